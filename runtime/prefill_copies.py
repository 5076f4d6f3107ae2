"""The copies of a chunk's lots, each behind what it must not overtake.

Copies over the link and copies within the device run on lanes of their own, and neither waits for
the other unless it has to:

    into a staging buffer       behind the last compute that read it, and the last move out of it
    from staging into a slot    behind its landing, and the last compute that read the slot
    from the bank into a slot   behind the last compute and the last copy that read the slot
    a slot that was moved into  is read behind the move

The compute lane waits for the last move when it is done with a staged lot, so that what follows
there, and buffers that it frees, are behind the move.
"""

from __future__ import annotations

from collections.abc import Collection

from residency.policies.step import Phase
from residency.runtime.admission import Placed
from residency.runtime.counters import Source
from residency.runtime.lanes import Mark
from residency.runtime.learning import Learning
from residency.runtime.lots import Lot, Pending
from residency.runtime.staging import StagingRing
from residency.runtime.transfers import Transfers

LOT_BYTES = 96 << 20  # about two milliseconds of the link


class ChunkCopies:
    """Serves one executor."""

    def __init__(
        self, ring: StagingRing, transfers: Transfers, learning: Learning, group_size: int
    ) -> None:
        self._ring = ring
        self._transfers = transfers
        self._learning = learning
        # Of what waited for a router: small, so that little is left to compute when the last one
        # has landed; not smaller, for each is work of the host's.
        self.lot_size = max(1, min(group_size, LOT_BYTES // transfers.rows.shape[1]))

    def begin(self) -> None:
        """Copies of the chunk come behind all compute that was issued before."""
        # Behind the last move into a slot, and behind the last copy out of one.
        self._start = self._moved = self._read = self._transfers.lanes.mark()

    def stage(self, lot: Pending, source: Source = Source.STREAM) -> Lot | None:
        """Issue a lot into the next staging buffer; None while all of them are in flight."""
        buffer = self._ring.acquire()
        if buffer is None:
            return None
        layer, experts = lot.layer, lot.experts
        rows, after = list(buffer.rows(len(experts))), (self._start, buffer.free)
        if lot.slots is not None:
            ready = self._transfers.duplicate(layer, Phase.PREFILL, lot.slots, rows, *after)
            self._read = ready
        else:
            ready = self._transfers.fetch(layer, Phase.PREFILL, source, experts, rows, *after)
            self._learning.copied(layer, len(experts), ready, waited=lot.waited)
        return Lot(layer, experts, rows, ready, buffer)

    def admit(
        self, layer: int, placed: Placed, landed: dict[int, int], lots: Collection[Lot], after: Mark
    ) -> list[Lot]:
        """Issue what an admission has placed: lots over the link, then moves of what landed.

        landed: by expert, the staging rows of `lots`. after: behind the last compute that reads the
        freed slots.
        """
        issued: list[Lot] = []
        pairs = list(zip(*placed.misses, strict=True))
        crossing = [pair for pair in pairs if pair[0] not in landed]
        for start in range(0, len(crossing), self.lot_size):
            experts, rows = map(list, zip(*crossing[start : start + self.lot_size], strict=True))
            ready = self._transfers.fetch(
                layer, Phase.PREFILL, Source.FETCH, experts, rows, after, self._read
            )
            self._learning.copied(layer, len(experts), ready, waited=True)
            issued.append(Lot(layer, experts, rows, ready))
        if kept := [(landed[expert], row) for expert, row in pairs if expert in landed]:
            staged, slots = map(list, zip(*kept, strict=True))
            marks = after, *(lot.ready for lot in lots)
            self._moved = self._transfers.duplicate(layer, Phase.PREFILL, staged, slots, *marks)
        return issued

    def done(self, lot: Lot) -> None:
        """The compute of a lot was issued; its buffer, if it has one, takes another."""
        if lot.buffer is not None:
            self._transfers.lanes.wait(self._moved)
            self._ring.release(lot.buffer)

    def reset(self) -> None:
        """Take all buffers back after a chunk that was broken off; the device must be idle."""
        self._ring.reset()
