"""Slot states: what the slots held at one moment, and what their policy knew, to begin there again.

Runs that start in the same state differ by what is compared alone. Bytes are not kept a second
time: those of experts that have left their slots since are copied from the banks once more.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from residency.policies.step import Phase
from residency.runtime.counters import Counters, Source
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

    @property
    def num_held(self) -> int:
        """Experts that lay in slots."""
        return int((self._pool.id_of != self._pool.space.sink).sum())

    def put_back(self, runtime: OffloadRuntime) -> int:
        """The same runtime is in this state again; the experts that had to be copied for it.

        In another number of slots, those of the highest (key, id) are in them, as many as fit.
        """
        ids = self._pool.id_of
        if len(ids) == runtime.pool.num_slots:
            gone = (runtime.pool.id_of != ids) & (ids != self._pool.space.sink)
            slots: list[int] = gone.nonzero().flatten().tolist()
            fill(runtime, ids, slots)
            runtime.pool.take(self._pool)
            copied = len(slots)
        else:
            history = {name: tensor.cpu() for name, tensor in self._pool.policy.state().items()}
            copied = seat(runtime, ids, history)
        runtime.clock.copy_(self._clock)
        runtime.tokens_seen = self._tokens_seen
        return copied


def seat(runtime: OffloadRuntime, wanted: torch.Tensor, history: Mapping[str, torch.Tensor]) -> int:
    """Begin with this history, the policy's tensors on the CPU, and with the experts of `wanted`
    (int32 [slots there were], the sink id where one was empty); those that are in slots now.

    In as many slots as there were each expert has its own. Of more experts than there are slots,
    those of the highest (key, id) stay, and the policy is told who left.
    """
    pool, sink = runtime.pool, runtime.pool.space.sink
    with pool.rules.calling("restore"):
        pool.policy.restore(history)
    pool.rules.check_state("restore")
    on_host = torch.tensor(sorted(runtime.quotas.host_layers), device=pool.device)
    stays_out = torch.isin(wanted // pool.space.num_experts, on_host)
    fitting = _fitting(pool, wanted.masked_fill(stays_out, sink))
    pool.place(fitting)
    if len(left := wanted[~torch.isin(wanted, fitting) & (wanted != sink)]):
        pool.moved(pool.nobody, left.long())
    held: list[int] = (fitting != sink).nonzero().flatten().tolist()
    fill(runtime, fitting, held)
    return len(held)


def fill(runtime: OffloadRuntime, id_of: torch.Tensor, slots: Sequence[int]) -> None:
    """Copy into `slots` the experts that `id_of` (int32 [num_slots]) says lie there.

    These bytes are no prompt's, and no counter of the runtime's counts them.
    """
    by_layer: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    ids = id_of.tolist()
    for slot in slots:
        layer, expert = divmod(ids[slot], runtime.banks.space.num_experts)
        by_layer[layer].append((expert, slot))
    space, device = runtime.banks.space, runtime.rows.device
    counters = Counters(space.num_layers, runtime.rows.shape[1], device)
    transfers = Transfers(runtime.banks, runtime.rows, runtime.lanes, counters)
    for layer, pairs in by_layer.items():
        experts, rows = zip(*sorted(pairs), strict=True)
        after = runtime.lanes.mark()
        transfers.fetch(layer, Phase.PREFILL, Source.FETCH, experts, rows, after)
    runtime.lanes.synchronize()


def _fitting(pool: SlotPool, wanted: torch.Tensor) -> torch.Tensor:
    """`wanted` where there are as many slots; else, share by share, the highest ranks that fit, in
    the order of their slots: int32 [num_slots].
    """
    if len(wanted) == pool.num_slots:
        return wanted
    fitting, sink = torch.full_like(pool.id_of, pool.space.sink), pool.space.sink
    num_shares = pool.num_slots // pool.share_size
    for number, share in enumerate(wanted.chunk(num_shares)):
        held = share[share != sink].long()
        by_id = held.argsort()
        order = by_id[pool.policy.keys[held[by_id]].argsort(stable=True)]
        best = order[max(0, len(order) - pool.share_size) :].sort().values
        first = number * pool.share_size
        fitting[first : first + len(best)] = held[best].int()
    return fitting
