"""compose: Hydra overrides in, one checked combination out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from residency.conf.build import build_part
from residency.conf.options import (
    CONFIG_NAME,
    GROUPS,
    PRESETS,
    composed,
    hydra,
    option_names,
    suggestion,
)
from residency.conf.root import ROOT_KEYS, Root, build_root
from residency.conf.saved import Saved
from residency.conf.text import to_yaml
from residency.policies.base import Conflict, Part
from residency.policies.cache import CachePolicy
from residency.policies.compatibility import conflicts
from residency.policies.decode import DecodeTarget
from residency.policies.errors import ConfigError
from residency.policies.prefill import PrefillMode
from residency.runtime.devices import Device
from residency.runtime.memory import row_faults
from residency.runtime.models import Model
from residency.runtime.offload import Policies
from residency.runtime.state_file import state_faults
from residency.runtime.workloads import Measurement, Workload


@dataclass(frozen=True)
class Config:
    """One composed combination. tree: the plain composed config, as `yaml` prints it.

    root: the keys that belong to no group.
    """

    parts: dict[str, Part]
    tree: dict[str, Any]
    root: Root = field(default_factory=Root)

    @property
    def model(self) -> Model:
        return cast(Model, self.parts["model"])

    @property
    def device(self) -> Device:
        return cast(Device, self.parts["device"])

    @property
    def workload(self) -> Workload:
        return cast(Workload, self.parts["workload"])

    @property
    def measurement(self) -> Measurement:
        """The workload, where `residency bench` composed it."""
        return cast(Measurement, self.parts["workload"])

    @property
    def policies(self) -> Policies:
        return Policies(
            cast(CachePolicy, self.parts["cache"]),
            cast(PrefillMode, self.parts["prefill"]),
            cast(DecodeTarget, self.parts["decode"]),
        )

    def conflicts(self) -> Iterator[Conflict]:
        """Every reason why this combination cannot run, each with its mend; reads no weights."""
        found = list(conflicts(list(self.parts.values())))
        yield from found
        if not any(conflict.concerns(("model", "cache", "prefill")) for conflict in found):
            policies, space = self.policies, self.model.architecture.space
            prefill = policies.prefill.config
            cache, batch = policies.cache, self.workload.batch
            # As many as memory affords are judged when that is known.
            slots = 0 if cache.fills_memory else cache.num_slots(space)
            shares = cache.num_shares(space)
            yield from row_faults(space, slots, prefill.groups, batch, shares)
            yield from cache.shape_faults(space)
            yield from state_faults(cache, space)
        if not any(conflict.concerns(("model", "decode")) for conflict in found):
            yield from self.policies.decode.layer_faults(self.model.architecture.space.num_layers)
        if not any(conflict.concerns(("model", "workload")) for conflict in found):
            yield from self.workload.context_faults(self.model.context)

    def faults(self, *groups: str) -> Iterator[Conflict]:
        """What is wrong with the parts of these groups alone."""
        for group in groups:
            yield from self.parts[group].faults()

    def yaml(self) -> str:
        """The tree as YAML that Hydra reads back as it is."""
        return to_yaml(self.tree)


def compose(
    overrides: Sequence[str] = (),
    *,
    prompt: str | None = None,
    prompts: Sequence[str] = (),
    saved: Saved | None = None,
) -> Config:
    """Compose the config groups under `overrides`, in Hydra's syntax.

    prompt: the workload's prompt, taken literally; in an override ${...} would be interpolated.
    prompts: likewise, one or several. saved: what takes the place of the default choices.

    Raises ConfigError, in one line, for an override that does not parse, an unknown group, option
    or key, or a value of another type. Conflicts between parts are not errors here:
    `Config.conflicts` lists them.
    """
    texts = [*prompts] if prompt is None else [prompt, *prompts]
    if saved and texts:
        saved = saved.without("workload", "prompt", "prompts")
    with hydra():
        read = parsed(overrides)
        with saved.stored() if saved else nullcontext(CONFIG_NAME) as name:
            tree = composed([_accepted(override, saved) for override in read], name)
        root = build_root({key: value for key, value in tree.items() if key not in GROUPS})
        parts = {}
        for group in GROUPS:
            node = tree[group] if isinstance(tree[group], dict) else {}
            given = _keys_given(group, read)
            if "_target_" in given:  # another class, with its own defaults
                node = {key: value for key, value in node.items() if key in given}
            parts[group] = part = build_part(group, node, custom=root.allow_custom)
            tree[group] = node | {k: v for k, v in asdict(part.config).items() if k not in node}
        if texts:
            values = {"prompt": texts[0]} if len(texts) == 1 else {"prompts": texts}
            parts["workload"] = _with_prompts(parts["workload"], values)
            tree["workload"] |= values
    return Config(parts, {key: tree[key] for key in (*GROUPS, *ROOT_KEYS)}, root)


def accepted(overrides: Sequence[str]) -> list[str]:
    """The overrides of one combination as Hydra gets them. Raises ConfigError."""
    return [_accepted(override, None) for override in parsed(overrides)]


def parsed(overrides: Sequence[str], options: Any = None) -> list[Override]:
    """Each override, read by Hydra's grammar. Raises ConfigError for one that cannot be read.

    options: what a glob asks for the options of a group, as Hydra's config loader answers.
    """
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
            parsed[-1].config_loader = options
        except (HydraException, ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{text or repr(text)}: not an override of the form key=value in Hydra's syntax "
                f"({reason}); quote what is special in it: key='\"a=b\"'"
            ) from error
    return parsed


def _keys_given(group: str, overrides: Sequence[Override]) -> set[str]:
    """The keys of the group to which overrides give values."""
    keys = [override.key_or_group.split(".") for override in overrides]
    return {names[1] for names in keys if names[0] == group and len(names) > 1}


def _accepted(override: Override, saved: Saved | None) -> str:
    """The override as Hydra gets it: options checked, keys forced in so that the schema judges."""
    text = override.input_line
    assert text is not None, "a parsed override has its text"
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(f"{text}: several values where one is run; give one of them")
    group = key.partition(".")[0]
    if group.partition("/")[0] == "hydra":
        raise ConfigError(f"{text}: Hydra only composes here; none of its own settings has effect")
    if group not in (*GROUPS, PRESETS, *ROOT_KEYS):
        known = suggestion(group, (*GROUPS, PRESETS, *ROOT_KEYS))
        raise ConfigError(f"{text}: there is no such config group or key; {known}")
    if key in (*GROUPS, PRESETS):
        return _choice(override, saved)
    if override.package is not None:
        raise ConfigError(f"{text}: a key has no package; give it a value with {key}=...")
    if group == PRESETS:
        raise ConfigError(f"{text}: a preset has no keys; {_options(PRESETS)}")
    if override.is_delete():
        raise ConfigError(f"{text}: a key cannot go away; give it a value with {key}=...")
    return text if override.is_force_add() or override.is_add() else f"++{text}"


def _choice(override: Override, saved: Saved | None) -> str:
    """The choice of an option, or of no preset."""
    text, key, value = override.input_line, override.key_or_group, override.value()
    if override.package is not None or override.is_add() or override.is_force_add():
        raise ConfigError(f"{text}: choose with {key}=NAME; {_options(key)}")
    if override.is_delete() or value is None:
        if key == PRESETS:
            return f"~{PRESETS}"
        raise ConfigError(f"{text}: a combination needs one {key}; {_options(key)}")
    if str(value) not in (names := option_names(key)):
        raise ConfigError(f"{key}={value}: there is no such {key}; {suggestion(str(value), names)}")
    assert text is not None, "a parsed override has its text"
    return saved.override(key, str(value)) if saved and key != PRESETS else text


def _with_prompts(workload: Part, values: dict[str, Any]) -> Part:
    if not hasattr(workload.config, "prompt"):
        raise ConfigError(f"workload={workload.name}: it takes no prompt")
    return type(workload)(replace(workload.config, **values))


def _options(group: str) -> str:
    return f"choose one of {', '.join(option_names(group))}"
