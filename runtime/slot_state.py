"""Slot states: what the slots held at one moment, and what their policy knew, to begin there again.

Runs that start in the same state differ by what is compared alone. Bytes are not kept a second
time: those of experts that have left their slots since are copied from the banks once more.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch

from residency.policies.step import Phase
from residency.runtime.counters import Source
from residency.runtime.offload import OffloadRuntime
from residency.runtime.slots import SlotPool
from residency.runtime.transfers import Transfers


class SlotState:
    """One runtime's slots between two steps."""

    def __init__(self, runtime: OffloadRuntime) -> None:
        pool = runtime.pool
        policy = copy.copy(pool.policy)
        self._pool = SlotPool(pool.space, pool.num_slots, policy, pool.device)
        self._pool.take(pool)
        self._clock = runtime.clock.clone()
        self._tokens_seen = runtime.tokens_seen

    def put_back(self, runtime: OffloadRuntime) -> int:
        """The same runtime is in this state again; the experts that had to be copied for it."""
        ids = self._pool.id_of
        gone = (runtime.pool.id_of != ids) & (ids != self._pool.space.sink)
        slots: list[int] = gone.nonzero().flatten().tolist()
        fill(runtime, ids, slots)
        runtime.pool.take(self._pool)
        runtime.clock.copy_(self._clock)
        runtime.tokens_seen = self._tokens_seen
        return len(slots)


def fill(runtime: OffloadRuntime, id_of: torch.Tensor, slots: Sequence[int]) -> None:
    """Copy into `slots` the experts that `id_of` (int32 [num_slots]) says lie there."""
    by_layer: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    ids = id_of.tolist()
    for slot in slots:
        layer, expert = divmod(ids[slot], runtime.banks.space.num_experts)
        by_layer[layer].append((expert, slot))
    transfers = Transfers(runtime.banks, runtime.rows, runtime.lanes, runtime.counters)
    for layer, pairs in by_layer.items():
        experts, rows = zip(*sorted(pairs), strict=True)
        after = runtime.lanes.mark()
        transfers.fetch(layer, Phase.PREFILL, Source.FETCH, experts, rows, after)
    runtime.lanes.synchronize()
