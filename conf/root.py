"""The root keys: settings of a run that belong to no config group.

One more is a field of `Root`, or of a class that a field holds: its words in the docstring, its
default in config.yaml, and a row among the tests that it is not inert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from residency.conf.schema import checked
from residency.policies.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Debug:
    """verify_banks: take a checksum of every expert when it is loaded and compare it at the end of
    each generation, before its report is given. A scan of all banks, as fast as memory is
    read; the report says how long it took.
    """

    verify_banks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """Given as KEY=VALUE, or as KEY.NESTED=VALUE where a key holds keys of its own.

    profile: `residency run` writes trace.json into --out: what one chunk of the prompt and one
        decode step did and when, for ui.perfetto.dev. What is timed is slower then.
    allow_custom: `_target_` may name any class that can be imported, e.g.
        cache._target_=my_module.MyPolicy, not only those of residency and of installed plugins.
    debug: checks that cost time, keys of its own.
    """

    profile: bool = False
    allow_custom: bool = False
    debug: Debug = dataclasses.field(default_factory=Debug)


ROOT_KEYS = tuple(field.name for field in dataclasses.fields(Root))


def build_root(tree: Mapping[str, Any]) -> Root:
    """The root keys of a composed tree, groups left out. Raises ConfigError as `checked` does."""
    root: Root = _built(Root, tree, "", "the root")
    return root


def root_leaves(schema: type = Root, where: str = "") -> Iterator[str]:
    """Every key that takes a value, as an override names it."""
    for name, nested in _fields(schema):
        yield from [f"{where}{name}"] if nested is None else root_leaves(nested, f"{where}{name}.")


def _built(schema: type, params: Mapping[str, Any], where: str, owner: str) -> Any:
    values = dict(params)
    built = {}
    for name, nested in _fields(schema):
        if nested is not None:
            own = values.pop(name, {})
            if not isinstance(own, Mapping):
                keys = ", ".join(root_leaves(nested, f"{where}{name}."))
                raise ConfigError(f"{where}{name}={own}: it has keys of its own; give {keys}")
            built[name] = _built(nested, own, f"{where}{name}.", f"{where}{name}")
    return dataclasses.replace(checked(schema, values, where, owner), **built)


def _fields(schema: type) -> Iterator[tuple[str, type | None]]:
    """The keys of a schema, and the schema of what they hold, where that has keys."""
    types = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = types[field.name]
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        yield field.name, kind if nested else None
