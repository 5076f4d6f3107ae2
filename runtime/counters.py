"""Counters: lookups, hits, misses, evictions and bytes, per MoE layer and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch

from residency.policies.errors import PolicyError
from residency.policies.step import Phase

PHASES = tuple(Phase)
FIELDS = ("lookups", "hits", "misses", "evictions")


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
    bytes: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Counters:
    """Counts on the device, read once at the end; bytes are counted where copies are issued."""

    def __init__(self, num_layers: int, row_bytes: int, device: torch.device) -> None:
        self._row_bytes = row_bytes
        shape = (len(PHASES), num_layers, len(FIELDS))
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host_counts = torch.zeros(shape, dtype=torch.int64)
        self._gathered = torch.zeros(shape, dtype=torch.int64, device=device)
        self._computed = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self._bytes: dict[tuple[int, Phase, Source], int] = defaultdict(int)

    def reset(self) -> None:
        self._counts.zero_()
        self._host_counts.zero_()
        self._gathered.zero_()
        self._computed.zero_()
        self._bytes.clear()

    def count(self, layer: int, phase: Phase, counts: torch.Tensor) -> None:
        """Add int64 [4] lookups, hits, misses, evictions of one step, from host or device."""
        self._of(counts)[PHASES.index(phase), layer] += counts

    def gathered(self, layer: int, phase: Phase) -> torch.Tensor:
        """int64 [4] to which device code adds the counts of steps whose misses it gathers itself.

        Their bytes are known only there: one row for each miss.
        """
        return self._gathered[PHASES.index(phase), layer]

    def count_evictions(self, layer: int, phase: Phase, counts: torch.Tensor) -> None:
        """Add only the evictions of an admission whose lookups were counted before."""
        self._of(counts)[PHASES.index(phase), layer, -1] += counts[-1]

    def _of(self, counts: torch.Tensor) -> torch.Tensor:
        return self._host_counts if counts.device.type == "cpu" else self._counts

    def count_computed(self, layer: int, phase: Phase, num_experts: torch.Tensor) -> None:
        self._computed[PHASES.index(phase), layer] += num_experts

    def moved(self, layer: int, phase: Phase, source: Source, num_bytes: int) -> None:
        self._bytes[layer, phase, source] += num_bytes

    def rows(self) -> list[LayerCounts]:
        """All counts by phase and layer. Raises PolicyError if a sum does not come out."""
        rows = list(self._rows())
        for row in rows:
            if row.hits + row.misses != row.lookups:
                raise PolicyError(
                    f"layer {row.layer}, {row.phase}: {row.hits} hits + {row.misses} misses are "
                    f"not {row.lookups} lookups"
                )
        return rows

    def _rows(self) -> Iterator[LayerCounts]:
        counts = ((self._counts + self._gathered).cpu() + self._host_counts).tolist()
        gathered, computed = self._gathered.tolist(), self._computed.tolist()
        for p, phase in enumerate(PHASES):
            for layer, (lookups, hits, misses, evictions) in enumerate(counts[p]):
                moved = {str(s): self._bytes.get((layer, phase, s), 0) for s in Source}
                moved[Source.FETCH] += gathered[p][layer][FIELDS.index("misses")] * self._row_bytes
                yield LayerCounts(
                    layer=layer,
                    phase=str(phase),
                    lookups=lookups,
                    hits=hits,
                    misses=misses,
                    evictions=evictions,
                    computed=computed[p][layer],
                    bytes=moved,
                )
