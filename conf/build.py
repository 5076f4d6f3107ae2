"""The one place that instantiates: checked keys in, parts and engines out.

Hydra's own `instantiate` is not used: on 1.3 it copies dataclasses that are passed to it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from residency.conf.options import option_names, option_node, suggestion
from residency.conf.plugins import target_prefixes
from residency.policies.base import Part
from residency.policies.errors import ConfigError

if TYPE_CHECKING:
    from residency.conf.compose import Config
    from residency.runtime.engine import Engine
    from residency.runtime.loading import Progress

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    int | str: "a whole number or text",
    list[int]: "a list of whole numbers, e.g. [1,2]",
    list[str]: "a list of texts, e.g. ['a b',c]",
}


def build_part(group: str, node: Mapping[str, Any]) -> Part:
    """The part that a config node describes.

    Raises ConfigError for a key that its schema does not know, a value of another type, a value
    that is missing, or a `_target_` outside residency and the installed plugins.
    """
    params = dict(node)
    cls = part_class(group, params.pop("_target_", None))
    config = _checked(group, cls, params)
    return cls(config, **_nested(cls, config))


def escaped(node: Any) -> Any:
    """Plain values as OmegaConf takes them: text that it would interpolate stays as it is."""
    if isinstance(node, dict):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", node)
    return node


def part_class(group: str, target: object) -> type[Part]:
    """The class that `_target_` names."""
    if not isinstance(target, str) or target.partition(".")[0] not in target_prefixes():
        raise ConfigError(
            f"{group}._target_={target}: only classes of {', '.join(target_prefixes())} may be "
            f"built; choose an option with {group}=NAME"
        )
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the code of a plugin may raise
        reason = f"{type(error).__name__}: {error}"
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
    return Engine(
        config.model.architecture,
        config.model.weights(),
        config.policies,
        device,
        context=config.model.context,
        batch=config.workload.batch if batch is None else batch,
        routing=config.model.routing(device),
        progress=progress,
        fixed_costs=fixed_costs,
        notes=[*config.model.notes(), *config.device.notes()],
        **config.device.engine_options(),
    )


def _checked(group: str, cls: type[Part], params: dict[str, Any]) -> Any:
    """An instance of cls.Config from `params`, every key known and every value of its type."""
    known = [field.name for field in dataclasses.fields(cls.Config)]
    for key in params:
        if key not in known:
            name = cls.__module__.rpartition(".")[2]
            what = suggestion(str(key), known) if known else "it has no keys"
            raise ConfigError(f"{group}.{key}: {group}={name} has no such key; {what}")
    types = get_type_hints(cls.Config)
    merged = OmegaConf.structured(cls.Config)
    OmegaConf.set_readonly(merged, False)
    for key, value in params.items():
        try:
            if value == MISSING:
                merged[key] = MISSING  # a merge would leave the default in place
            else:
                merged = OmegaConf.merge(merged, {key: escaped(value)})
        except OmegaConfBaseException as error:
            what = _WORDS.get(types[key], str(types[key]))
            raise ConfigError(f"{group}.{key}={value}: it must be {what}") from error
    if missing := sorted(map(str, OmegaConf.missing_keys(merged))):
        raise ConfigError(f"{group}.{missing[0]}: a value is needed; set {group}.{missing[0]}=...")
    values = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(values, dict), "a config class is a mapping"
    return cls.Config(**{str(key): value for key, value in values.items()})


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
