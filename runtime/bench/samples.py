"""What one timed run gave, and what several runs give together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from residency.policies.step import Phase
from residency.runtime.counters import LINK_SOURCES, LayerCounts, summed
from residency.runtime.report import BatchReport, PhaseTotals, Report


@dataclass(frozen=True)
class Spread:
    """Several values of one quantity."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Sample:
    """One phase of one run. device_s: by CUDA events, None without CUDA.

    waits: whether every layer waited for its router. counters: of this phase, a row a layer.
    """

    seconds: float
    device_s: float | None
    step_s: tuple[float, ...]  # of each decode step, none for a prefill
    totals: PhaseTotals
    waits: bool = True
    counters: tuple[LayerCounts, ...] = ()

    @classmethod
    def prefill(cls, report: Report, device_s: float | None) -> Sample:
        waits = all(chosen.waits for chosen in report.choices)
        counters = _of(Phase.PREFILL, report.counters)
        return cls(report.ttft_s, device_s, (), report.phases[0], waits, counters)

    @classmethod
    def decode(cls, report: BatchReport) -> Sample:
        steps, counters = tuple(report.step_s), _of(Phase.DECODE, report.counters)
        return cls(sum(steps), None, steps, report.phases[1], counters=counters)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "device_s": self.device_s,
            "step_s": list(self.step_s),
            "totals": self.totals.as_dict(),
        }


@dataclass(frozen=True)
class Samples:
    """Runs of one prompt length, or of one decode, warm-ups left out."""

    tokens: int  # of the prompt, or decoded in each run of each sequence
    runs: tuple[Sample, ...]
    batch: int = 1  # sequences

    @property
    def seconds(self) -> Spread:
        return Spread.of([run.seconds for run in self.runs])

    @property
    def device_s(self) -> Spread | None:
        times = [run.device_s for run in self.runs if run.device_s is not None]
        return Spread.of(times) if times else None

    @property
    def per_token(self) -> Spread:
        """Seconds of a step, in which each sequence gets a token."""
        return Spread.of([run.seconds / self.tokens for run in self.runs])

    @property
    def tokens_per_s(self) -> Spread:
        """Tokens of all sequences."""
        return Spread.of([self.batch * self.tokens / run.seconds for run in self.runs])

    @property
    def step_s(self) -> Spread:
        return Spread.of([step for run in self.runs for step in run.step_s])

    @property
    def waits(self) -> bool:
        """Whether every copy of every prefill waited for its layer's router."""
        return all(run.waits and not run.totals.ahead for run in self.runs)

    @property
    def hit_rate(self) -> float | None:
        lookups = sum(run.totals.lookups for run in self.runs)
        return sum(run.totals.hits for run in self.runs) / lookups if lookups else None

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes moved in a run, by source, on average."""
        sources = self.runs[0].totals.bytes
        return {s: statistics.fmean(run.totals.bytes[s] for run in self.runs) for s in sources}

    @property
    def link_bytes(self) -> float:
        return sum(self.bytes.get(source, 0.0) for source in LINK_SOURCES)

    @property
    def link_share(self) -> float | None:
        """Part of the time in which the link was copying, where it can be told."""
        copied = [
            run.totals.link_seconds for run in self.runs if run.totals.link_seconds is not None
        ]
        whole = sum(run.seconds for run in self.runs)
        return sum(copied) / whole if len(copied) == len(self.runs) and whole else None

    @property
    def counters(self) -> list[LayerCounts]:
        """A row a layer, summed over the runs."""
        return [summed(rows) for rows in zip(*(run.counters for run in self.runs), strict=True)]

    def as_dict(self) -> dict[str, Any]:
        hit_rate = self.hit_rate
        return {
            "tokens": self.tokens,
            "hit_rate": hit_rate,
            "miss_rate": None if hit_rate is None else 1 - hit_rate,
            "bytes": self.bytes,
            "link_bytes": self.link_bytes,
            "link_share": self.link_share,
            "counters": [row.as_dict() for row in self.counters],
            "runs": [run.as_dict() for run in self.runs],
        }


def spread_dict(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def _of(phase: Phase, rows: Sequence[LayerCounts]) -> tuple[LayerCounts, ...]:
    return tuple(row for row in rows if row.phase == phase)
