"""The decode executor: one token's routed experts, from slots, through the link, or on the host."""

from __future__ import annotations

import torch

from residency.policies.decode import DecodeTarget
from residency.policies.step import Step
from residency.runtime.admission import Placed
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters, Source
from residency.runtime.experts import Call, ExpertMath, Maths, Work
from residency.runtime.slots import SlotPool
from residency.runtime.transfers import Transfers

HOST = torch.device("cpu")


class DecodeExecutor:
    """Splits each step as the decode target says and sums both parts."""

    def __init__(
        self,
        target: DecodeTarget,
        pool: SlotPool,
        banks: Banks,
        transfers: Transfers,
        maths: Maths,
        counters: Counters,
    ) -> None:
        self.target = target
        self.pool = pool
        self.banks = banks
        self.transfers = transfers
        self.maths = maths
        self.counters = counters
        self._host_maths = [ExpertMath(banks.layout, rows) for rows in banks.layers]

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """The layer's output [T, H]."""
        work: Work = self.maths.begin(call)
        experts = call.ids_TK.flatten()
        ids = experts + step.layer * self.pool.space.num_experts
        on_host = self.target.on_host(ids, self.pool.slot_of[ids] >= 0, step)
        if on_host is not None:
            self._compute_on_host(step, work, experts[on_host].unique())
            experts = experts[~on_host]
        if len(experts):
            self._compute_in_slots(step, work, experts)
        return work.combined()

    def _compute_in_slots(self, step: Step, work: Work, experts: torch.Tensor) -> None:
        admission = self.pool.admit(experts, step)
        self.counters.count(step.layer, step.phase, admission.counts)
        self.pool.touch(admission.unique, step)
        placed = Placed.of(admission, step.layer, self.pool.space)
        after = self.transfers.lanes.mark()
        ready = None
        if placed.misses.experts:
            ready = self.transfers.fetch(
                step.layer, step.phase, Source.FETCH, *placed.misses, after
            )
        self.maths.run(work, *placed.hits)
        if ready is not None:
            self.transfers.lanes.wait(ready)
            self.maths.run(work, *placed.misses)

    def _compute_on_host(self, step: Step, work: Work, experts: torch.Tensor) -> None:
        """Results of `experts` (int64 [M], distinct) computed in the bank; all count as misses."""
        num_experts = torch.tensor(len(experts))
        none = torch.zeros_like(num_experts)
        self.counters.count(
            step.layer, step.phase, torch.stack([num_experts, none, num_experts, none])
        )
        self.counters.count_computed(step.layer, step.phase, num_experts)
        host_work = work.to(HOST)
        ids = experts.tolist()
        self._host_maths[step.layer].run(host_work, ids, ids)
        chosen = torch.isin(work.call.ids_TK, experts)
        work.results_TKH[chosen] = host_work.results_TKH[chosen.cpu()].to(work.call.x_TH.device)
        if work.call.x_TH.device != HOST:
            num_bytes = host_work.call.x_TH.nbytes + host_work.results_TKH[chosen.cpu()].nbytes
            self.counters.moved(step.layer, step.phase, Source.ACTIVATIONS, num_bytes)
