"""The decode executor: one token's routed experts, from slots, through the link, or on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from residency.policies.step import Step
from residency.runtime.admission import Placed, Rows
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters, Source
from residency.runtime.experts import Call, ExpertMath, Maths, Work
from residency.runtime.host_experts import HostExperts, HostJob
from residency.runtime.lanes import Mark
from residency.runtime.quotas import QuotaTable
from residency.runtime.rates import StepTimes
from residency.runtime.slots import SlotPool
from residency.runtime.timeline import Track
from residency.runtime.transfers import Transfers

HOST = torch.device("cpu")


class DecodeExecutor:
    """Splits each step's misses by the decode target's quotas and sums all parts.

    On a device the copies run meanwhile; on the CPU one side follows the other.
    """

    def __init__(
        self,
        quotas: QuotaTable,
        pool: SlotPool,
        banks: Banks,
        transfers: Transfers,
        maths: Maths,
        counters: Counters,
        host: HostExperts | None = None,
    ) -> None:
        """host: computes experts in their banks; None for plain torch."""
        self.quotas = quotas
        self.pool = pool
        self.banks = banks
        self.transfers = transfers
        self.maths = maths
        self.counters = counters
        self.host = host
        self._jobs: dict[tuple[int, int], HostJob] = {}
        self._host_maths = [ExpertMath(banks.layout, rows) for rows in banks.layers]
        self._forget_times()

    def prepare(self) -> None:
        """Before a step: learn from the times of the last one."""
        fetch_s = np.array([mark.seconds() for mark in self._copied])
        self.quotas.observe(StepTimes(self._fetched, fetch_s, self._computed, self._host_s))
        self._forget_times()

    def finish(self) -> None:
        """Behind a step's last layer."""

    def _forget_times(self) -> None:
        num_layers = self.pool.space.num_layers
        self._fetched, self._computed = np.zeros((2, num_layers), dtype=np.int64)
        self._host_s = np.zeros(num_layers)
        self._copied = [Mark() for _ in range(num_layers)]

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """The layer's output [T, H]."""
        layer, timeline = step.layer, self.transfers.lanes.timeline
        work: Work = self.maths.begin(call)
        experts = call.ids_TK.flatten()
        quota = self.quotas.of(step.layer, len(experts))
        with timeline.during(Track.POLICY, "admission", layer=layer):
            admission = self.pool.admit(experts, step, quota)
        self.counters.count(step.layer, step.phase, admission.counts)
        with timeline.during(Track.POLICY, "touch", layer=layer):
            self.pool.touch(admission.unique, step)
        placed = Placed.of(admission, step.layer, self.pool.space)
        copied = self._fetch(step, placed.misses)
        with timeline.computing("hits", layer=layer, experts=placed.hits.experts):
            self.maths.run(work, *placed.hits)
        extra_TH = None
        if placed.on_host:
            start = time.perf_counter()
            with timeline.during(
                Track.HOST_EXPERTS, "experts", layer=layer, experts=placed.on_host
            ):
                if self.host is None:
                    self._compute_in_torch(step, work, placed.on_host)
                else:
                    extra_TH = self._compute_in_job(self.host, step, call, placed.on_host)
            self._computed[step.layer] = len(placed.on_host)
            self._host_s[step.layer] = time.perf_counter() - start
        if placed.misses.experts:
            self.transfers.lanes.wait(copied)
            with timeline.computing("lot", layer=layer, **placed.misses._asdict()):
                self.maths.run(work, *placed.misses)
        with timeline.computing("sum", layer=layer):
            out_TH = work.combined()
        return out_TH if extra_TH is None else out_TH + extra_TH.to(out_TH)

    def _fetch(self, step: Step, misses: Rows) -> Mark:
        if not misses.experts:
            return Mark()
        after = self.transfers.lanes.mark()
        mark = self.transfers.fetch(step.layer, step.phase, Source.FETCH, *misses, after)
        self._fetched[step.layer] = len(misses.experts)
        self._copied[step.layer] = mark
        return mark

    def _compute_in_job(
        self, host: HostExperts, step: Step, call: Call, experts: Sequence[int]
    ) -> torch.Tensor:
        """The sum of `experts` over each token, fp32 [T, H], overwritten by the layer's next."""
        key = (step.layer, len(call.ids_TK))
        if key not in self._jobs:
            self._jobs[key] = host.job(*key)
        job = self._jobs[key]
        job.x_TH.copy_(call.x_TH)
        job.ids_TK.copy_(call.ids_TK)
        job.weights_TK.copy_(call.weights_TK)
        job.chosen_E.zero_()
        job.chosen_E[experts] = 1
        host.run(job)
        if call.x_TH.device != HOST:
            num_bytes = job.x_TH.nbytes + job.y_TH.nbytes
            self.counters.moved(step.layer, step.phase, Source.ACTIVATIONS, num_bytes)
        return job.y_TH

    def _compute_in_torch(self, step: Step, work: Work, experts: Sequence[int]) -> None:
        """Results of `experts`, computed in the bank."""
        host_work = work.to(HOST)
        self._host_maths[step.layer].run(host_work, experts, experts)
        chosen = torch.isin(work.call.ids_TK, torch.tensor(experts, device=work.call.x_TH.device))
        work.results_TKH[chosen] = host_work.results_TKH[chosen.cpu()].to(work.call.x_TH.device)
        if work.call.x_TH.device != HOST:
            num_bytes = host_work.call.x_TH.nbytes + host_work.results_TKH[chosen.cpu()].nbytes
            self.counters.moved(step.layer, step.phase, Source.ACTIVATIONS, num_bytes)
