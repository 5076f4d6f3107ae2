"""Overrides with several values, as the points of a grid: Hydra's own grammar and order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from residency.conf.build import part_class
from residency.conf.commands import MEASURED
from residency.conf.compose import accepted, parsed
from residency.conf.options import GROUPS, PRESETS, composed, option_names, suggestion
from residency.conf.root import ROOT_KEYS, build_root
from residency.policies.errors import ConfigError
from residency.runtime.workloads import Measurement
from residency.sweeps.manifest import Words

MOST_POINTS = 10_000
TARGET = "_target_"
CUSTOM = "allow_custom"  # the root key that lets a target be any class


class Options:
    """What a glob asks Hydra's config loader for; plugins' options are among the answers."""

    def get_group_options(self, group: str, results_filter: object = None) -> list[str]:
        return option_names(group)


def points(overrides: Sequence[str]) -> list[Words]:
    """Every choice of one value of each override, the last varying fastest.

    Raises ConfigError for an override that cannot be read, a glob that matches nothing, and a grid
    that is too large.
    """
    read = parsed(overrides, Options())
    for override in read:
        _check_values(override)
    count = math.prod(_num_values(override) for override in read)
    if count > MOST_POINTS:
        raise ConfigError(
            f"the grid has {count:,} points, and a sweep takes at most {MOST_POINTS:,}; give fewer "
            "values, or several sweeps"
        )
    (batch,) = BasicSweeper.split_arguments(read, None)
    return [tuple(point) for point in batch]


def _check_values(override: Override) -> None:
    try:
        number = _num_values(override)
    except HydraException as error:
        raise ConfigError(f"{override.input_line}: {str(error).splitlines()[0]}") from error
    if not number:
        group = override.key_or_group
        known = f"; {group} has {', '.join(option_names(group))}" if group in GROUPS else ""
        raise ConfigError(f"{override.input_line}: there is no value in it{known}")


def _num_values(override: Override) -> int:
    if not override.is_sweep_override():
        return 1
    if not override.is_discrete_sweep():
        raise HydraException("an interval has no end of values; give values with commas, or range")
    return sum(1 for _ in override.sweep_string_iterator())


@dataclass(frozen=True)
class Choices:
    """The part of a point that chooses options; the rest are their keys.

    added: the choice of a workload, where the point has none. words: all choices, `added` first.
    """

    words: Words
    keys: Words
    added: Words

    @classmethod
    def of(cls, point: Words) -> Choices:
        chosen = [_is_choice(override) for override in parsed(point)]
        words = tuple(word for word, choice in zip(point, chosen, strict=True) if choice)
        keys = tuple(word for word, choice in zip(point, chosen, strict=True) if not choice)
        added = _workload(words)
        return cls((*added, *words), keys, added)

    def known(self, group: str) -> tuple[str, ...]:
        """The keys of the option that is chosen of `group`."""
        return _known_keys(self.words)[group]


def ignored(point: Choices, all_points: Sequence[Choices]) -> Iterator[str]:
    """Keys of `point` that its options do not know, each known by another option of the sweep.

    Raises ConfigError for a key that no option of the sweep knows.
    """
    for word, override in zip(point.keys, parsed(point.keys), strict=True):
        group, _, path = override.key_or_group.partition(".")
        key = path.partition(".")[0]
        if group not in GROUPS or not key or key in point.known(group):
            continue
        if key not in (known := _all_keys(group, all_points)):
            names = ", ".join(_names(group, all_points))
            help_ = suggestion(key, known) if known else "they have no keys"
            raise ConfigError(f"{group}.{key}: no {group} of the sweep ({names}) has it; {help_}")
        yield word


def _is_choice(override: Override) -> bool:
    key = override.key_or_group
    return key in (*GROUPS, PRESETS, CUSTOM) or key.endswith(f".{TARGET}")


def _workload(words: Words) -> Words:
    """A measurement, unless a word or its preset chooses what is run."""
    chosen = any(word.startswith("workload=") for word in words)
    if chosen or issubclass(_classes(words)["workload"], Measurement):
        return ()
    return (f"workload={MEASURED}",)


@cache
def _classes(words: Words) -> dict[str, type[Any]]:
    tree = composed(accepted(words))
    custom = build_root({key: tree[key] for key in ROOT_KEYS if key in tree}).allow_custom
    return {group: part_class(group, tree[group].get(TARGET), custom=custom) for group in GROUPS}


@cache
def _known_keys(words: Words) -> dict[str, tuple[str, ...]]:
    return {
        group: (TARGET, *(field.name for field in fields(cls.Config)))
        for group, cls in _classes(words).items()
    }


def _all_keys(group: str, all_points: Sequence[Choices]) -> list[str]:
    distinct = {point.words: point for point in all_points}.values()
    return sorted({key for point in distinct for key in point.known(group)} - {TARGET})


def _names(group: str, all_points: Sequence[Choices]) -> list[str]:
    modules = {_classes(point.words)[group].__module__ for point in all_points}
    return sorted(module.rpartition(".")[2] for module in modules)
