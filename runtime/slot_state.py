"""Slot states: what the slots held at one moment, and what their policy knew, to begin there again.

Runs that start in the same state differ by what is compared alone. Bytes are not kept a second
time: those of experts that have left their slots since are copied from the banks once more.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from residency.policies.step import Phase
from residency.runtime.counters import Source
from residency.runtime.offload import OffloadRuntime
from residency.runtime.transfers import Transfers


@dataclass(frozen=True)
class SlotState:
    """One runtime's slots between two steps. All tensors are copies on its device."""

    slot_of: torch.Tensor
    id_of: torch.Tensor
    policy: dict[str, torch.Tensor]
    clock: torch.Tensor
    tokens_seen: int

    @classmethod
    def of(cls, runtime: OffloadRuntime) -> SlotState:
        pool = runtime.pool
        return cls(
            pool.slot_of.clone(),
            pool.id_of.clone(),
            {name: tensor.clone() for name, tensor in pool.policy.state().items()},
            runtime.clock.clone(),
            runtime.tokens_seen,
        )

    def put_back(self, runtime: OffloadRuntime) -> int:
        """The same runtime is in this state again; the experts that had to be copied for it."""
        pool = runtime.pool
        gone = (pool.id_of != self.id_of) & (self.id_of != pool.space.sink)
        slots: list[int] = gone.nonzero().flatten().tolist()
        self._refill(runtime, slots)
        pool.invalidate()
        pool.slot_of.copy_(self.slot_of)
        pool.id_of.copy_(self.id_of)
        for name, tensor in pool.policy.state().items():
            tensor.copy_(self.policy[name])
        runtime.clock.copy_(self.clock)
        runtime.tokens_seen = self.tokens_seen
        return len(slots)

    def _refill(self, runtime: OffloadRuntime, slots: list[int]) -> None:
        """Copy into `slots` the experts that lay there."""
        by_layer: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        ids = self.id_of.tolist()
        for slot in slots:
            layer, expert = divmod(ids[slot], runtime.banks.space.num_experts)
            by_layer[layer].append((expert, slot))
        transfers = Transfers(runtime.banks, runtime.rows, runtime.lanes, runtime.counters)
        for layer, pairs in by_layer.items():
            experts, rows = zip(*sorted(pairs), strict=True)
            after = runtime.lanes.mark()
            transfers.fetch(layer, Phase.PREFILL, Source.FETCH, experts, rows, after)
        runtime.lanes.synchronize()
