"""Transfers: rows from bank to device and from slot to staging, on the copy lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from residency.policies.step import Phase
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters, Source
from residency.runtime.faults import Point, Work
from residency.runtime.lanes import Lanes, Mark
from residency.runtime.row_copies import RowCopies, over_the_link, within


class Transfers:
    """Moves rows and counts the bytes. `rows` is the device's uint8 [R, row_bytes]."""

    def __init__(self, banks: Banks, rows: torch.Tensor, lanes: Lanes, counters: Counters) -> None:
        self.banks = banks
        self.rows = rows
        self.lanes = lanes
        self.counters = counters
        self._over_the_link = over_the_link(rows, banks.layers, lanes)
        self._within = within(rows, lanes)

    def fetch(
        self,
        layer: int,
        phase: Phase,
        source: Source,
        experts: Sequence[int],
        rows: Sequence[int],
        *after: Mark,
    ) -> Mark:
        """Copy `experts` of the layer's bank into `rows`, once `after` has passed."""
        bank = self.banks.layers[layer]
        return self._copy(self._over_the_link, bank, layer, phase, source, experts, rows, after)

    def duplicate(
        self, layer: int, phase: Phase, slots: Sequence[int], rows: Sequence[int], *after: Mark
    ) -> Mark:
        """Copy `slots` into `rows` on the device, once `after` has passed."""
        return self._copy(self._within, self.rows, layer, phase, Source.D2D, slots, rows, after)

    def _copy(
        self,
        copies: RowCopies,
        origin: torch.Tensor,
        layer: int,
        phase: Phase,
        source: Source,
        sources: Sequence[int],
        targets: Sequence[int],
        after: tuple[Mark, ...],
    ) -> Mark:
        with Work(Point.COPY), self.lanes.copying(*after) as done:
            copies.issue(origin, sources, targets)
        num_bytes = len(sources) * self.rows.shape[1]
        self.counters.moved(layer, phase, source, num_bytes)
        self.lanes.timeline.copied(
            done, source, layer=layer, phase=phase, sources=sources, rows=targets, bytes=num_bytes
        )
        return done
