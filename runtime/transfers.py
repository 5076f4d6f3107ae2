"""Transfers: rows from bank to device over the link, and rows within the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from residency.policies.step import Phase
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters, Source
from residency.runtime.faults import Point, Work
from residency.runtime.lanes import Lanes, Mark
from residency.runtime.row_copies import over_the_link, within


class Transfers:
    """Moves rows and counts the bytes. `rows` is the device's uint8 [R, row_bytes]."""

    def __init__(self, banks: Banks, rows: torch.Tensor, lanes: Lanes, counters: Counters) -> None:
        self.banks = banks
        self.rows = rows
        self.lanes = lanes
        self.counters = counters
        self._over_the_link = over_the_link(rows, banks.layers, lanes.link)
        self._within = within(rows, lanes.moves)

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
        bank, lane = self.banks.layers[layer], self.lanes.link
        with Work(Point.COPY), lane.copying(*after) as done:
            self._over_the_link.issue(bank, experts, rows)
        self._copied(done, layer, phase, source, experts, rows)
        return done

    def duplicate(
        self, layer: int, phase: Phase, slots: Sequence[int], rows: Sequence[int], *after: Mark
    ) -> Mark:
        """Copy `slots` into `rows` on the device, once `after` has passed."""
        with Work(Point.COPY), self.lanes.moves.copying(*after) as done:
            self._within.issue(self.rows, slots, rows)
        self._copied(done, layer, phase, Source.D2D, slots, rows)
        return done

    def _copied(
        self,
        done: Mark,
        layer: int,
        phase: Phase,
        source: Source,
        sources: Sequence[int],
        rows: Sequence[int],
    ) -> None:
        num_bytes = len(sources) * self.rows.shape[1]
        self.counters.moved(layer, phase, source, num_bytes)
        self.lanes.timeline.copied(
            done, source, layer=layer, phase=phase, sources=sources, rows=rows, bytes=num_bytes
        )
