"""The report of conversations; docs/result-format.md describes `as_dict()`.

VERSION rises whenever a key changes its meaning or goes away.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from residency.runtime.bench.limits import Floor, LinkRate
from residency.runtime.bench.modes_report import ratio
from residency.runtime.bench.samples import Samples, Spread, spread_dict
from residency.runtime.bench.script import Line
from residency.runtime.conversation import Turn
from residency.runtime.report import PhaseTotals

VERSION = 1
KIND = "conversation"


@dataclass(frozen=True)
class Entry:
    """One turn under one mode. samples: its prefills; turn: the last of them, with the answer."""

    samples: Samples
    turn: Turn
    choices: list[dict[str, Any]]
    floor: Floor | None
    row_bytes: int

    @property
    def ttft_s(self) -> Spread:
        return self.samples.seconds

    @property
    def decode(self) -> PhaseTotals:
        return self.turn.report.phases[1]

    @property
    def decode_s(self) -> float:
        return sum(self.turn.report.step_s)

    @property
    def routed_bytes(self) -> float:
        """Of the distinct experts that the prefill was routed to, chunk by chunk and layer by
        layer: what its new tokens are about, whatever was moved.
        """
        lookups = [run.totals.lookups for run in self.samples.runs]
        return statistics.fmean(lookups) * self.row_bytes

    @property
    def over_floor(self) -> float | None:
        return ratio(self.ttft_s.median, None if self.floor is None else self.floor.own_s)

    def as_dict(self) -> dict[str, Any]:
        report = self.turn.report
        return {
            "ttft_s": spread_dict(self.ttft_s),
            "tpot_s": report.tpot_s,
            "decode_s": self.decode_s,
            "prefill_hit_rate": self.samples.hit_rate,
            "decode_hit_rate": self.decode.hit_rate,
            "prefill_bytes": self.samples.bytes,
            "decode_bytes": self.decode.bytes,
            "link_bytes": self.samples.link_bytes,
            "routed_bytes": self.routed_bytes,
            "waits_for_router": self.samples.waits,
            "floor": None if self.floor is None else asdict(self.floor),
            "over_own_floor": self.over_floor,
            "choices": self.choices,
            "runs": [run.as_dict() for run in self.samples.runs],
        }


@dataclass(frozen=True)
class Row:
    """One turn, under every mode."""

    line: Line
    entries: Mapping[str, Entry]

    @property
    def turn(self) -> Turn:
        """Its schedule, which is the same under every mode."""
        return next(iter(self.entries.values())).turn

    def as_dict(self) -> dict[str, Any]:
        return {
            "session": self.line.session,
            "turn": self.line.turn,
            "dropped_turns": self.line.dropped,
            "new_tokens": self.turn.new,
            "cached_tokens": self.turn.cached,
            "answer_tokens": len(self.line.answer),
            "schedule": {"chunks": list(self.turn.chunks), "decode_steps": self.turn.decode_steps},
            "modes": {label: entry.as_dict() for label, entry in self.entries.items()},
        }


@dataclass(frozen=True)
class Sum:
    """One mode over all turns. fit: of the turns' fastest times over their routed bytes, since what
    else the machine did can only add to them; None where there is no line.
    """

    ttft_s: float
    decode_s: float
    floor_s: float | None
    link_bytes: float
    fit: statistics.LinearRegression | None
    correlation: float | None

    @classmethod
    def of(cls, entries: list[Entry]) -> Sum:
        times = [entry.ttft_s.least for entry in entries]
        routed = [entry.routed_bytes for entry in entries]
        floors = [entry.floor.own_s for entry in entries if entry.floor is not None]
        drawn = len(set(routed)) > 1 and len(set(times)) > 1
        return cls(
            sum(entry.ttft_s.median for entry in entries),
            sum(entry.decode_s for entry in entries),
            sum(floors) if len(floors) == len(entries) else None,
            sum(entry.samples.link_bytes for entry in entries),
            statistics.linear_regression(routed, times) if drawn else None,
            statistics.correlation(routed, times) if drawn else None,
        )

    def as_dict(self) -> dict[str, Any]:
        own = {"ttft_s": self.ttft_s, "decode_s": self.decode_s, "floor_s": self.floor_s}
        fit = None
        if self.fit is not None:
            fit = {
                "seconds": self.fit.intercept,
                "seconds_per_routed_byte": self.fit.slope,
                "correlation": self.correlation,
            }
        return own | {"link_bytes": self.link_bytes, "ttft_over_routed_bytes": fit}


@dataclass(frozen=True)
class ConversationReport:
    """All turns of all sessions. reason: why there are no floors; empty if there are."""

    model: str
    format: str  # of the experts
    title: str
    made_up: bool
    keys: dict[str, Any]
    room: int  # tokens of the sequence that all turns ran in
    rows: tuple[Row, ...]
    link: LinkRate
    reason: str
    whole_stream_s: float  # link time of every expert once
    load_s: dict[str, float]
    memory: dict[str, int]
    environment: dict[str, str]
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        """The modes, the combination's own first."""
        return list(self.rows[0].entries)

    @property
    def sums(self) -> dict[str, Sum]:
        return {label: Sum.of([row.entries[label] for row in self.rows]) for label in self.labels}

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "kind": KIND,
            "model": self.model,
            "format": self.format,
            "title": self.title,
            "made_up_weights": self.made_up,
            "plan": self.keys | {"modes": self.labels, "room": self.room},
            "turns": [row.as_dict() for row in self.rows],
            "sums": {label: one.as_dict() for label, one in self.sums.items()},
            "limits": {
                "link": self.link.as_dict(),
                "whole_stream_s": self.whole_stream_s,
                "reason": self.reason,
            },
            "load_s": self.load_s,
            "memory": self.memory,
            "environment": self.environment,
            "notes": self.notes,
        }
