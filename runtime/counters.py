"""Counters: lookups, hits, misses, evictions and bytes, per MoE layer and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import torch

from residency.policies.errors import PolicyError
from residency.policies.step import Phase

PHASES = tuple(Phase)
FIELDS = ("lookups", "hits", "misses", "evictions", "computed")
MISSES, EVICTIONS, COMPUTED = map(FIELDS.index, ("misses", "evictions", "computed"))


class Source(StrEnum):
    """Where moved bytes came from and went to."""

    STREAM = "stream"  # host bank -> staging
    FETCH = "fetch"  # host bank -> slot, or -> a place read once when the policy declines
    D2D = "d2d"  # slot -> staging, on the device
    TABLE = "table"  # rows of host tables, read by id
    ACTIVATIONS = "activations"  # to and from the host, for experts computed there


LINK_SOURCES = (Source.STREAM, Source.FETCH, Source.TABLE, Source.ACTIVATIONS)


@dataclass(frozen=True)
class LayerCounts:
    """One row of the report. A lookup is one distinct expert in one step of one layer."""

    layer: int
    phase: str
    lookups: int
    hits: int
    misses: int
    evictions: int
    computed: int  # misses that the host computed where they lie
    fetched: int  # misses that were copied from the bank to be read by this phase
    ahead: int = 0  # experts fetched ahead of a router that was waited for, none of them admitted
    ahead_in_time: int = 0  # of those, in staging before the router's answer was there
    ahead_used: int = 0  # of those, routed to; the others' bytes were wasted
    bytes: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summed(rows: Sequence[LayerCounts]) -> LayerCounts:
    """The counts of one layer and phase over several runs."""
    first = rows[0]
    assert all((row.layer, row.phase) == (first.layer, first.phase) for row in rows), "one layer's"
    names = [each.name for each in fields(first) if each.name not in ("layer", "phase", "bytes")]
    counts = {name: sum(getattr(row, name) for row in rows) for name in names}
    moved = {source: sum(row.bytes[source] for row in rows) for source in first.bytes}
    return LayerCounts(first.layer, first.phase, **counts, bytes=moved)


class Counters:
    """Counts on the device, read once at the end; bytes are counted where copies are issued."""

    def __init__(self, num_layers: int, row_bytes: int, device: torch.device) -> None:
        self._row_bytes = row_bytes
        shape = (len(PHASES), num_layers, len(FIELDS))
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host_counts = torch.zeros(shape, dtype=torch.int64)
        self._gathered = torch.zeros(shape, dtype=torch.int64, device=device)
        self._published = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self._bytes: dict[tuple[int, Phase, Source], int] = defaultdict(int)
        self._ahead = torch.zeros(num_layers, 3, dtype=torch.int64)

    def reset(self) -> None:
        self._counts.zero_()
        self._host_counts.zero_()
        self._gathered.zero_()
        self._published.zero_()
        self._bytes.clear()
        self._ahead.zero_()

    def count(self, layer: int, phase: Phase, counts: torch.Tensor) -> None:
        """Add one step's counts, int64 in the order of FIELDS, from host or device."""
        self._of(counts)[PHASES.index(phase), layer, : len(counts)] += counts

    def gathered(self, layer: int, phase: Phase) -> torch.Tensor:
        """int64 [5] to which device code adds the counts of steps whose misses it gathers itself.

        Their bytes are known only there: one row for each miss that the host does not compute.
        """
        return self._gathered[PHASES.index(phase), layer]

    def published(self, layer: int, phase: Phase) -> torch.Tensor:
        """int64 [1] to which device code adds the bytes of activations that it moves itself."""
        return self._published[PHASES.index(phase), layer : layer + 1]

    def count_evictions(self, layer: int, phase: Phase, counts: torch.Tensor) -> None:
        """Add only the evictions of an admission whose lookups were counted before."""
        self._of(counts)[PHASES.index(phase), layer, EVICTIONS] += counts[EVICTIONS]

    def _of(self, counts: torch.Tensor) -> torch.Tensor:
        return self._host_counts if counts.device.type == "cpu" else self._counts

    def moved(self, layer: int, phase: Phase, source: Source, num_bytes: int) -> None:
        self._bytes[layer, phase, source] += num_bytes

    def fetched_ahead(self, layer: int, num: int, in_time: int, used: int) -> None:
        """Experts that prefill fetched before the layer's router had spoken."""
        self._ahead[layer] += torch.tensor([num, in_time, used])

    def rows(self) -> list[LayerCounts]:
        """All counts by phase and layer. Raises PolicyError if a sum does not come out."""
        rows = list(self._rows())
        for row in rows:
            if row.hits + row.misses != row.lookups:
                raise PolicyError(
                    f"layer {row.layer}, {row.phase}: {row.hits} hits + {row.misses} misses are "
                    f"not {row.lookups} lookups"
                )
            if row.phase == Phase.DECODE and row.fetched + row.computed != row.misses:
                raise PolicyError(
                    f"layer {row.layer}, {row.phase}: {row.fetched} fetched + {row.computed} "
                    f"computed are not {row.misses} misses"
                )
        return rows

    def _rows(self) -> Iterator[LayerCounts]:
        counts = ((self._counts + self._gathered).cpu() + self._host_counts).tolist()
        gathered = (self._gathered[..., MISSES] - self._gathered[..., COMPUTED]).tolist()
        published = self._published.tolist()
        for p, phase in enumerate(PHASES):
            for layer, (lookups, hits, misses, evictions, computed) in enumerate(counts[p]):
                ahead = self._ahead[layer].tolist() if phase is Phase.PREFILL else [0, 0, 0]
                moved = {str(s): self._bytes.get((layer, phase, s), 0) for s in Source}
                moved[Source.FETCH] += gathered[p][layer] * self._row_bytes
                moved[Source.ACTIVATIONS] += published[p][layer]
                yield LayerCounts(
                    layer=layer,
                    phase=str(phase),
                    lookups=lookups,
                    hits=hits,
                    misses=misses,
                    evictions=evictions,
                    computed=computed,
                    fetched=moved[Source.FETCH] // self._row_bytes,
                    ahead=ahead[0],
                    ahead_in_time=ahead[1],
                    ahead_used=ahead[2],
                    bytes=moved,
                )
