"""What a schema's keys may hold: plain values in, an instance of a config class out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from residency.conf.options import suggestion
from residency.policies.errors import ConfigError

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    int | str: "a whole number or text",
    list[int]: "a list of whole numbers, e.g. [1,2]",
    list[str]: "a list of texts, e.g. ['a b',c]",
}


def checked(schema: type, params: Mapping[str, Any], where: str, owner: str) -> Any:
    """An instance of `schema` from `params`, every key known and every value of its type.

    where: what stands before a key in an override, e.g. "cache."; owner: who lacks an unknown key.
    Raises ConfigError for an unknown key, a value of another type and a value that is missing.
    """
    known = [field.name for field in dataclasses.fields(schema)]
    for key in params:
        if key not in known:
            what = suggestion(str(key), known) if known else "it has no keys"
            raise ConfigError(f"{where}{key}: {owner} has no such key; {what}")
    types = get_type_hints(schema)
    merged = OmegaConf.structured(schema)
    OmegaConf.set_readonly(merged, False)
    for key, value in params.items():
        try:
            if value == MISSING:
                merged[key] = MISSING  # a merge would leave the default in place
            else:
                merged = OmegaConf.merge(merged, {key: escaped(value)})
        except OmegaConfBaseException as error:
            what = _WORDS.get(types[key], str(types[key]))
            raise ConfigError(f"{where}{key}={value}: it must be {what}") from error
    if missing := sorted(map(str, OmegaConf.missing_keys(merged))):
        raise ConfigError(f"{where}{missing[0]}: a value is needed; set {where}{missing[0]}=...")
    values = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(values, dict), "a config class is a mapping"
    return schema(**{str(key): value for key, value in values.items()})


def escaped(node: Any) -> Any:
    """Plain values as OmegaConf takes them: text that it would interpolate stays as it is."""
    if isinstance(node, dict):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", node)
    return node
