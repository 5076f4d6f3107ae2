"""The one place that instantiates: checked keys in, parts and engines out.

Hydra's own `instantiate` is not used: on 1.3 it copies dataclasses that are passed to it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from residency.conf.options import option_names, option_node, suggestion
from residency.conf.plugins import target_prefixes
from residency.conf.schema import checked, escaped
from residency.policies.base import Part
from residency.policies.errors import ConfigError

if TYPE_CHECKING:
    from residency.conf.compose import Config
    from residency.runtime.engine import Engine
    from residency.runtime.loading import Progress


def build_part(group: str, node: Mapping[str, Any], *, custom: bool = False) -> Part:
    """The part that a config node describes.

    custom: its `_target_` may lie anywhere. Raises ConfigError for a key that its schema does not
    know, a value of another type, a value that is missing, or a `_target_` that may not be built.
    """
    params = dict(node)
    cls = part_class(group, params.pop("_target_", None), custom=custom)
    name = cls.__module__.rpartition(".")[2]
    config = checked(cls.Config, params, f"{group}.", f"{group}={name}")
    return cls(config, **_nested(cls, config))


def part_class(group: str, target: object, *, custom: bool = False) -> type[Part]:
    """The class that `_target_` names. Unless `custom`, no module outside residency and the
    installed plugins is imported.
    """
    if not isinstance(target, str) or not (custom or target.partition(".")[0] in target_prefixes()):
        raise ConfigError(
            f"{group}._target_={target}: only classes of {', '.join(target_prefixes())} may be "
            f"built; choose an option with {group}=NAME, or let it be any class that can be "
            "imported, with allow_custom=true"
        )
    module, _, name = target.rpartition(".")
    if not (module and all(part.isidentifier() for part in target.split("."))):
        raise ConfigError(f"{group}._target_={target}: cannot be imported: it is no MODULE.CLASS")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the code of others may raise
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            reason += "; PYTHONPATH=. finds modules of this folder"
        raise ConfigError(f"{group}._target_={target}: cannot be imported ({reason})") from error
    if not (isinstance(cls, type) and issubclass(cls, Part)):
        raise ConfigError(f"{group}._target_={target}: that is not a part of residency")
    if inspect.isabstract(cls):
        raise ConfigError(f"{group}._target_={target}: that is only an interface")
    if cls.group != group:
        raise ConfigError(f"{group}._target_={target}: that is a choice of {cls.group}")
    return cls


def build_engine(
    config: Config,
    progress: Progress | None = None,
    *,
    batch: int | None = None,
    fixed_costs: Path | None = None,
) -> Engine:
    """Load the model that `config` names, under its policies, on its device.

    progress is called with (what, bytes done, bytes in all). batch: most sequences that are decoded
    together, if not as many as the workload wants. fixed_costs: as Engine takes it. Raises
    ConfigError for the first conflict, and what Engine raises.
    """
    from residency.runtime.engine import Engine

    for conflict in config.conflicts():
        raise ConfigError(str(conflict))
    device = config.device.open()
    engine = Engine(
        config.model.architecture,
        config.model.weights(),
        config.policies,
        device,
        context=config.model.context,
        batch=config.workload.batch if batch is None else batch,
        snapshots=config.workload.snapshots,
        routing=config.model.routing(device),
        progress=progress,
        fixed_costs=fixed_costs,
        verify_banks=config.root.debug.verify_banks,
        notes=[*config.model.notes(), *config.device.notes()],
        **config.device.engine_options(),
    )
    if config.root.profile:
        engine.runtime.profile_steps()
    return engine


def _nested(cls: type[Part], config: Any) -> dict[str, Part | list[Part]]:
    """Parts that a key names as an option of a group, built with that option's defaults."""
    parts: dict[str, Part | list[Part]] = {}
    for field in dataclasses.fields(cls.Config):
        group = field.metadata.get("option_of")
        if group is not None:
            value = getattr(config, field.name)
            if isinstance(value, list):
                parts[field.name] = [_described(cls, field.name, group, text) for text in value]
            else:
                parts[field.name] = _named(cls, field.name, group, value)
    return parts


def _described(cls: type[Part], key: str, group: str, text: str) -> Part:
    """One part of a list: an option's name, and behind it values of its keys, as key=value."""
    name, *settings = text.split() or [""]
    node = _node(cls, key, group, name)
    try:
        return build_part(group, node | _settings(settings))
    except ConfigError as error:
        raise ConfigError(f"{cls.group}.{key}, {text}: {error}") from error


def _named(cls: type[Part], key: str, group: str, name: str) -> Part:
    return build_part(group, _node(cls, key, group, name))


def _node(cls: type[Part], key: str, group: str, name: str) -> dict[str, Any]:
    names = option_names(group)
    if name not in names:
        raise ConfigError(f"{cls.group}.{key}={name}: no such {group}; {suggestion(name, names)}")
    node = option_node(group, name)
    if part_class(group, node.get("_target_")) is cls:
        raise ConfigError(
            f"{cls.group}.{key}={name}: it cannot name itself; {_others(names, name)}"
        )
    return node


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Values by key, from texts of the form key=value. Raises ConfigError for any other."""
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise ConfigError(f"{text}: a value of a key has the form key=value")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(escaped(list(texts))))
    assert isinstance(values, dict), "keys have values"
    return {str(key): value for key, value in values.items()}


def _others(names: list[str], name: str) -> str:
    return f"choose one of {', '.join(other for other in names if other != name)}"
