"""Kernels behind the interface of `decode`: one layer of a decode step without a host round trip.

Equal to `admission.py` and `decode.py` in what it computes and counts; see `kernels/` for each
kernel beside its definition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from residency.policies.step import Step
from residency.runtime.admission import Copies, copy_list
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters
from residency.runtime.experts import Call
from residency.runtime.fused import activation_of
from residency.runtime.host_experts import HostJob
from residency.runtime.host_nodes import HostNodes
from residency.runtime.kernels.admission import MAX_IDS, launch_admit
from residency.runtime.kernels.decode_experts import launch_down, launch_gate_up
from residency.runtime.kernels.formats import ExpertShape
from residency.runtime.kernels.gather import launch_gather
from residency.runtime.kernels.publish import Stat, launch_publish, new_stats
from residency.runtime.kernels.touch import touch_of
from residency.runtime.lanes import Mark
from residency.runtime.quotas import QuotaTable
from residency.runtime.rates import StepTimes
from residency.runtime.slots import SlotPool


class Placing(NamedTuple):
    """Where a step's experts are, once `copies` have been made.

    row_of_E: int32 [E], -1 for those that are not on the device. host_expert: int32 [N], -1 for
    none. counts: int32 [6], as the admission kernel gives them.
    """

    row_of_E: torch.Tensor
    copies: Copies
    host_expert: torch.Tensor
    counts: torch.Tensor


class FusedDecode:
    """One layer of a decode step without a host round trip, so that it can be captured."""

    def __init__(
        self,
        shape: ExpertShape,
        pool: SlotPool,
        banks: Banks,
        rows: torch.Tensor,
        counters: Counters,
        quotas: QuotaTable,
        host: HostNodes | None = None,
    ) -> None:
        """host: computes what the quotas leave to it; None where they leave nothing."""
        self.shape = shape
        self.pool = pool
        self.banks = banks
        self.rows = rows
        self.counters = counters
        self.quotas = quotas
        self.host = host
        self._touch = touch_of(pool.policy)
        self._stats = new_stats(pool.space.num_layers, rows.device)
        pin = rows.device.type == "cuda"
        self._host_stats = torch.zeros(self._stats.shape, dtype=torch.int64, pin_memory=pin)

    def prepare(self) -> None:
        """Before a step: learn from the times of the last one."""
        if self.host is None or not self.host.is_timed or not self._host_stats.any():
            return
        stats = self._host_stats.numpy().T
        fetch_s, host_s = (
            np.maximum(stats[end] - stats[Stat.BEGIN], 0) / 1e9
            for end in (Stat.FETCH_END, Stat.HOST_END)
        )
        fetched, computed = stats[Stat.FETCHED].copy(), stats[Stat.COMPUTED].copy()
        self.quotas.observe(StepTimes(fetched, fetch_s, computed, host_s))

    def finish(self) -> None:
        """Behind a step's last layer: all streams join."""
        if self.host is not None:
            self.host.join()
            self._host_stats.copy_(self._stats, non_blocking=True)

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """The layer's output [T, H]."""
        ids, weights = call.ids_TK.contiguous(), call.weights_TK.contiguous()
        quota = self.quotas.of(step.layer, ids.numel())
        placing = self._place(step, ids, quota)
        job, done = None, Mark()
        if quota is not None:
            job, done = self._compute_on_host(step, call, ids, weights, placing)
        if step.layer not in self.quotas.host_layers:
            end = None if job is None else self._stat(step, Stat.FETCH_END)
            launch_gather(self.banks.layers[step.layer], self.rows, *placing.copies, end=end)
        activation = activation_of(call.module)
        assert activation is not None, "kernels were chosen for a gate they have no form for"
        activated = launch_gate_up(
            call.x_TH, ids, weights, placing.row_of_E, self.rows, self.shape, activation
        )
        extra = None
        if job is not None:
            extra = job.y_TH
            if done.event is not None:
                torch.cuda.current_stream(self.rows.device).wait_event(done.event)
        return launch_down(activated, self.rows, self.shape, call.residual_TH, extra)

    def _stat(self, step: Step, stat: Stat) -> torch.Tensor | None:
        """int64 [1], the place of a time; None where there is no clock."""
        timed = self.host is not None and self.host.is_timed
        return self._stats[step.layer, stat : stat + 1] if timed else None

    def _compute_on_host(
        self, step: Step, call: Call, ids: torch.Tensor, weights: torch.Tensor, placing: Placing
    ) -> tuple[HostJob, Mark]:
        assert self.host is not None, "the quotas leave experts to a host that is not there"
        job = self.host.job(step.layer, len(ids))
        launch_publish(
            call.x_TH,
            ids,
            weights,
            placing.host_expert,
            placing.counts,
            job.x_TH,
            job.ids_TK,
            job.weights_TK,
            job.chosen_E,
            self._stats[step.layer],
            self.counters.published(step.layer, step.phase),
            job.x_TH.nbytes + job.y_TH.nbytes,
            timed=self.host.is_timed,
        )
        end = self._stats[step.layer, Stat.HOST_END : Stat.HOST_END + 1]
        return job, self.host.run(job, end)

    def _place(self, step: Step, ids: torch.Tensor, quota: torch.Tensor | None) -> Placing:
        """Make room for what the step fetches, in one kernel where the policy takes everything."""
        pool = self.pool
        totals = self.counters.gathered(step.layer, step.phase)
        stays = step.layer in self.quotas.host_layers
        if ids.numel() > MAX_IDS or (pool.may_decline(step) and not stays):
            return self._place_by_definition(step, ids, quota, totals)
        moves = None
        if pool.policy.follows_moves and not stays:
            moves = ids.new_full((2, ids.numel()), pool.space.sink, dtype=torch.int64)
        admitted = launch_admit(
            ids,
            step.layer,
            pool.space.num_experts,
            pool.slot_of,
            pool.id_of,
            pool.policy.keys,
            totals=totals,
            quota=quota,
            moves=moves,
            slots=range(0) if stays else pool.slots_for(step.layer),
        )
        if moves is not None:
            pool.moved(*moves.unbind())
        pool.touch(admitted.unique, step, self._touch)
        copies = Copies(admitted.copy_expert, admitted.copy_slot, admitted.num_copies)
        row_of_E = pool.layer_slots(step.layer)
        return Placing(row_of_E, copies, admitted.host_expert, admitted.counts)

    def _place_by_definition(
        self, step: Step, ids: torch.Tensor, quota: torch.Tensor | None, totals: torch.Tensor
    ) -> Placing:
        pool = self.pool
        admission = pool.admit(ids.flatten(), step, quota)
        totals += admission.counts
        pool.touch(admission.unique, step, self._touch)
        copies = copy_list(admission, step.layer, pool.space)
        row_of_E = pool.layer_slots(step.layer).clone()
        experts = admission.unique - step.layer * pool.space.num_experts
        spare_E = torch.cat([row_of_E, row_of_E.new_zeros(1)])
        spare_E[experts.clamp(max=pool.space.num_experts)] = admission.rows.int()
        host_expert = torch.where(admission.on_host, experts, -1).int()
        padding = host_expert.new_full((ids.numel() - len(host_expert),), -1)
        counts = torch.cat([admission.counts.int(), copies.number])
        return Placing(spare_E[:-1], copies, torch.cat([host_expert, padding]), counts)
