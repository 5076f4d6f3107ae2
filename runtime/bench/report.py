"""The bench's report. `result.json` holds `BenchReport.as_dict()`; docs/result-format.md says how.

VERSION rises whenever a key changes its meaning or goes away.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from residency.runtime.bench.limits import Floor, LinkRate, Resident
from residency.runtime.bench.measure import Plan
from residency.runtime.bench.samples import Samples, spread_dict

VERSION = 1
KIND = "bench"


@dataclass(frozen=True)
class Point:
    """One prompt length.

    waits: whether every copy waited for its layer's router. floor: None where the all-resident
    times could not be had.
    """

    samples: Samples
    waits: bool
    floor: Floor | None

    def as_dict(self) -> dict[str, Any]:
        own = {
            "ttft_s": spread_dict(self.samples.seconds),
            "ttft_device_s": spread_dict(self.samples.device_s),
            "waits_for_router": self.waits,
            "floor": None if self.floor is None else asdict(self.floor),
        }
        return self.samples.as_dict() | own


@dataclass(frozen=True)
class Decode:
    """The decode. floor: None also where the host computes experts."""

    samples: Samples
    floor: Floor | None

    def as_dict(self) -> dict[str, Any]:
        own = {
            "batch": self.samples.batch,
            "tpot_s": spread_dict(self.samples.per_token),
            "tokens_per_s": spread_dict(self.samples.tokens_per_s),
            "step_s": spread_dict(self.samples.step_s),
            "floor": None if self.floor is None else asdict(self.floor),
        }
        return self.samples.as_dict() | own


@dataclass(frozen=True)
class BenchReport:
    """One combination, measured. title: its choices, for a table or a chart."""

    title: str
    made_up: bool
    plan: Plan
    prefill: tuple[Point, ...]
    decode: Decode
    link: LinkRate
    resident: Resident
    whole_stream_s: float  # link time of every expert once
    load_s: dict[str, float]
    memory: dict[str, int]
    environment: dict[str, str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        resident = self.resident
        return {
            "version": VERSION,
            "kind": KIND,
            "title": self.title,
            "made_up_weights": self.made_up,
            "plan": asdict(self.plan),
            "prefill": [point.as_dict() for point in self.prefill],
            "decode": self.decode.as_dict(),
            "limits": {
                "link": self.link.as_dict(),
                "whole_stream_s": self.whole_stream_s,
                "resident": {
                    "reason": resident.reason,
                    "prefill": [_resident_row(samples) for samples in resident.prefill],
                    "tpot_s": None
                    if resident.decode is None
                    else spread_dict(resident.decode.per_token),
                },
            },
            "load_s": self.load_s,
            "memory": self.memory,
            "environment": self.environment,
            "notes": self.notes,
        }


def _resident_row(samples: Samples) -> dict[str, Any]:
    return {
        "tokens": samples.tokens,
        "ttft_s": spread_dict(samples.seconds),
        "ttft_device_s": spread_dict(samples.device_s),
        "hit_rate": samples.hit_rate,
    }
