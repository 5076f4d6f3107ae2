"""The catalogue: every option of every group, what it does, and what works with what."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import MISSING

from residency.conf.build import build_part, part_class
from residency.conf.options import option_names, option_node, suggestion
from residency.policies.base import Conflict, Part
from residency.policies.compatibility import conflicts
from residency.policies.errors import ConfigError

POLICY_GROUPS = ("cache", "prefill", "decode")
MATRIX_GROUPS = (*POLICY_GROUPS, "device")


@dataclass(frozen=True)
class Parameter:
    key: str
    default: object
    meaning: str


@dataclass(frozen=True)
class Option:
    """One option as `residency policies` shows it. text: its module's docstring.

    refuses: what each of its needs says about combinations that lack it.
    """

    group: str
    name: str
    summary: str
    text: str
    parameters: tuple[Parameter, ...]
    refuses: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix. conflicts is empty where it works."""

    choices: dict[str, str]
    conflicts: tuple[Conflict, ...]


def describe(group: str, name: str) -> Option:
    """Raises ConfigError when the option's class cannot be had."""
    node = option_node(group, name)
    cls = part_class(group, node.pop("_target_", None))
    text = inspect.getdoc(inspect.getmodule(cls)) or ""
    summary = text.partition("\n\n")[0].replace("\n", " ").removeprefix(f"{name}: ")
    refuses = tuple(f"without {need.mend} or the like: {need.because}" for need in cls.needs)
    return Option(group, name, summary, text, tuple(_parameters(cls, node)), refuses)


def policies_named(name: str | None) -> list[Option]:
    """The policies of that name (also as group/name or group=name), or all of them for None.

    Raises ConfigError, with the closest name, when there is none.
    """
    names = [(group, option) for group in POLICY_GROUPS for option in option_names(group)]
    chosen = [p for p in names if name is None or name in (p[1], "/".join(p), "=".join(p))]
    if name is not None and not chosen:
        known = suggestion(name, [option for _, option in names])
        raise ConfigError(f"{name}: there is no such policy; {known}")
    return [describe(*pair) for pair in chosen]


def matrix() -> Iterator[Cell]:
    """Every combination of the policy and device options, at their defaults."""
    parts = {group: list(_buildable(group)) for group in MATRIX_GROUPS}
    for combination in itertools.product(*parts.values()):
        choices = {group: name for group, (name, _) in zip(parts, combination, strict=True)}
        found = tuple(conflicts([part for _, part in combination]))
        yield Cell(choices, found)


def _buildable(group: str) -> Iterator[tuple[str, Part]]:
    for name in option_names(group):
        node = option_node(group, name)
        if MISSING not in node.values():
            yield name, build_part(group, node)


def _parameters(cls: type[Part], node: dict[str, object]) -> Iterator[Parameter]:
    told = meanings(cls.Config)
    for field in dataclasses.fields(cls.Config):
        yield Parameter(field.name, node.get(field.name), told.get(field.name, ""))


def meanings(config: type) -> dict[str, str]:
    """What the docstrings of a config class and its bases say of each key, as `key: meaning`."""
    keys = "|".join(field.name for field in dataclasses.fields(config))
    told = re.compile(rf"^({keys}): ((?:.|\n(?!(?:{keys}): ))+)", re.MULTILINE)
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        for match in told.finditer(inspect.getdoc(cls) or "") if keys else ():
            found[match[1]] = " ".join(match[2].split())
    return found
