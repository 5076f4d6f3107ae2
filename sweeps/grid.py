"""The grid: every point of a sweep, composed; which of them run, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from residency.conf import compose
from residency.conf.commands import swept_faults
from residency.conf.compose import Config
from residency.conf.options import GROUPS, hydra
from residency.policies.base import Conflict
from residency.policies.errors import ResidencyError
from residency.sweeps.expansion import Choices, ignored, points
from residency.sweeps.manifest import Words

SHARED = ("model", "device")  # what jobs of one worker have in common


@dataclass(frozen=True)
class Point:
    """A combination that runs: its overrides, without those that it ignores."""

    overrides: Words
    config: Config


@dataclass(frozen=True)
class Skipped:
    """A combination that cannot work."""

    overrides: Words
    reasons: tuple[Conflict, ...]


@dataclass(frozen=True)
class Duplicate:
    """A combination that is one of the others: `same_as` is its index among the points."""

    overrides: Words
    same_as: int


@dataclass(frozen=True)
class Grid:
    """Each point of the product is in one of the three. points: those of one group are together."""

    points: list[Point]
    skipped: list[Skipped]
    duplicates: list[Duplicate]


def grid_of(overrides: Sequence[str], told: Callable[[int, int], None] | None = None) -> Grid:
    """Compose every point; `told` hears how many of how many.

    Raises ConfigError where a word is wrong in itself: an option, a key or a type.
    """
    with hydra():  # once for all points
        return _grid_of(points(overrides), told)


def _grid_of(asked: Sequence[Words], told: Callable[[int, int], None] | None) -> Grid:
    choices = [Choices.of(point) for point in asked]
    found: list[Point] = []
    skipped, duplicates = [], []
    seen: dict[str, int] = {}
    configs: dict[Words, Config] = {}
    for number, (words, point) in enumerate(zip(asked, choices, strict=True)):
        without = set(ignored(point, choices))
        kept = (*point.added, *(word for word in words if word not in without))
        if kept not in configs:
            configs[kept] = compose(kept)
        config = configs[kept]
        if told is not None:
            told(number + 1, len(asked))
        if reasons := tuple(_faults(config)):
            skipped.append(Skipped(words, reasons))
        elif (same := identity(config)) in seen:
            duplicates.append(Duplicate(words, seen[same]))
        else:
            seen[same] = len(found)
            found.append(Point(kept, config))
    return _grouped(found, skipped, duplicates)


def identity(config: Config, groups: Sequence[str] = GROUPS) -> str:
    """Equal for combinations whose parts of `groups` are equal, however they were written."""
    parts = {group: config.parts[group] for group in groups}
    plain = {
        group: [f"{type(part).__module__}.{type(part).__qualname__}", asdict(part.config)]
        for group, part in parts.items()
    }
    return json.dumps([plain, asdict(config.root)], sort_keys=True, default=str)


def _faults(config: Config) -> Iterator[Conflict]:
    """Why `config` cannot run."""
    try:
        yield from config.conflicts()
    except ResidencyError as error:  # a model that cannot even be looked at
        yield Conflict((f"model={config.model.name}",), str(error), "another model")
    yield from swept_faults(config)


def _grouped(points: list[Point], skipped: list[Skipped], duplicates: list[Duplicate]) -> Grid:
    """Points of one model and device follow one another, groups in the order they came up in."""
    groups = list(dict.fromkeys(identity(point.config, SHARED) for point in points))
    order = sorted(
        range(len(points)), key=lambda i: groups.index(identity(points[i].config, SHARED))
    )
    place = {old: new for new, old in enumerate(order)}
    return Grid(
        [points[i] for i in order],
        skipped,
        [Duplicate(each.overrides, place[each.same_as]) for each in duplicates],
    )
