"""The report of prefill modes that took turns; docs/result-format.md describes `as_dict()`.

VERSION rises whenever a key changes its meaning or goes away.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from residency.runtime.bench.crossing import crossing
from residency.runtime.bench.limits import LinkRate, Resident
from residency.runtime.bench.report import Point
from residency.runtime.bench.samples import Spread, spread_dict

VERSION = 1
KIND = "prefill_modes"


@dataclass(frozen=True)
class Entry:
    """One mode at one length. choices: of every layer of its timed turns, as the mode told them.

    fixed: it does not choose among ways by what it has measured.
    """

    point: Point
    choices: list[dict[str, Any]]
    fixed: bool

    @property
    def seconds(self) -> list[float]:
        """TTFT of each turn."""
        return [run.seconds for run in self.point.samples.runs]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def own_floor_s(self) -> float | None:
        return None if self.point.floor is None else self.point.floor.own_s

    @property
    def layers_by_choice(self) -> dict[str, int]:
        """How many layers each choice was made for, in all timed turns."""
        counts: Counter[str] = Counter()
        for choice in self.choices:
            counts[str(choice["choice"])] += int(choice["layers"])
        return dict(counts)


@dataclass(frozen=True)
class Stage:
    """One length: every mode, by its label."""

    tokens: int
    entries: Mapping[str, Entry]

    @property
    def least_floor_s(self) -> float | None:
        """The least floor of the plans measured."""
        floors = [entry.own_floor_s for entry in self.entries.values()]
        return min((floor for floor in floors if floor is not None), default=None)

    def over_best_fixed(self, label: str) -> Spread | None:
        """Ratios to the fastest fixed mode of the same turn; None without a fixed mode."""
        fixed = [entry.seconds for entry in self.entries.values() if entry.fixed]
        if not fixed:
            return None
        best = [min(turn) for turn in zip(*fixed, strict=True)]
        own = self.entries[label].seconds
        return Spread.of([a / b for a, b in zip(own, best, strict=True)])

    def as_dict(self) -> dict[str, Any]:
        least = self.least_floor_s
        modes = {
            label: entry.point.as_dict()
            | {
                "fixed": entry.fixed,
                "choices": entry.choices,
                "over_own_floor": ratio(entry.median_s, entry.own_floor_s),
                "over_least_floor": ratio(entry.median_s, least),
                "over_best_fixed": spread_dict(self.over_best_fixed(label)),
            }
            for label, entry in self.entries.items()
        }
        return {"tokens": self.tokens, "least_floor_s": least, "modes": modes}


@dataclass(frozen=True)
class Panel:
    """One pool behind one prefix. crossing: of the lines of two modes, or None.

    crosses_at: the least length at which both take the same time; None where they do not meet.
    """

    pool: str
    prefix: int
    stages: tuple[Stage, ...]
    crossing: tuple[str, ...]
    crosses_at: float | None

    @classmethod
    def of(cls, pool: str, prefix: int, stages: Sequence[Stage], pair: Sequence[str]) -> Panel:
        """pair: the two modes whose crossing is looked for, or none."""
        lengths = [stage.tokens for stage in stages]
        lines = [[stage.entries[label].median_s for stage in stages] for label in pair]
        met = crossing(lengths, *lines) if pair else None
        return cls(pool, prefix, tuple(stages), tuple(pair), met)

    @property
    def name(self) -> str:
        behind = f"{self.prefix:,} tokens in the KV cache" if self.prefix else "no prefix"
        return f"{self.pool} pool, {behind}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "pool": self.pool,
            "prefix": self.prefix,
            "crossing": {"modes": list(self.crossing), "tokens": self.crosses_at},
            "points": [stage.as_dict() for stage in self.stages],
        }


@dataclass(frozen=True)
class ModesReport:
    """All panels. title: the combination that the modes were part of."""

    model: str
    format: str  # of the experts
    title: str
    made_up: bool
    contest: dict[str, Any]
    panels: tuple[Panel, ...]
    link: LinkRate
    resident: Mapping[int, Resident]  # by prefix
    whole_stream_s: float  # link time of every expert once
    load_s: dict[str, float]
    memory: dict[str, int]
    environment: dict[str, str]
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        return list(self.panels[0].stages[0].entries)

    @property
    def routing(self) -> str:
        """In short, from the note that names it."""
        said = [note for note in self.notes if note.startswith("routing: ")]
        return said[0].partition(" (")[0] if said else "routing: the model's"

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "kind": KIND,
            "model": self.model,
            "format": self.format,
            "title": self.title,
            "made_up_weights": self.made_up,
            "plan": self.contest,
            "panels": [panel.as_dict() for panel in self.panels],
            "limits": {
                "link": self.link.as_dict(),
                "whole_stream_s": self.whole_stream_s,
                "resident": [
                    row for prefix, found in self.resident.items() for row in _rows(prefix, found)
                ],
                "reason": next(iter(self.resident.values())).reason,
            },
            "load_s": self.load_s,
            "memory": self.memory,
            "environment": self.environment,
            "notes": self.notes,
        }


def ratio(seconds: float, floor_s: float | None) -> float | None:
    return None if floor_s is None else seconds / floor_s


def _rows(prefix: int, resident: Resident) -> list[dict[str, Any]]:
    return [
        {
            "prefix": prefix,
            "tokens": samples.tokens,
            "ttft_s": spread_dict(samples.seconds),
            "ttft_device_s": spread_dict(samples.device_s),
            "hit_rate": samples.hit_rate,
        }
        for samples in resident.prefill
    ]
