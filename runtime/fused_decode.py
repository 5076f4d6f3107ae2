"""Kernels behind the interface of `decode`: one layer of a decode step without a host round trip.

Equal to `admission.py` and `decode.py` in what it computes and counts; see `kernels/` for each
kernel beside its definition.
"""

from __future__ import annotations

import torch

from residency.policies.step import Step
from residency.runtime.admission import copy_list
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters
from residency.runtime.experts import Call
from residency.runtime.fused import activation_of
from residency.runtime.kernels.admission import MAX_IDS, launch_admit
from residency.runtime.kernels.decode_experts import launch_down, launch_gate_up
from residency.runtime.kernels.formats import ExpertShape
from residency.runtime.kernels.gather import launch_gather
from residency.runtime.kernels.touch import touch_of
from residency.runtime.slots import SlotPool


class FusedDecode:
    """One layer of a decode step without a host round trip, so that it can be captured."""

    def __init__(
        self,
        shape: ExpertShape,
        pool: SlotPool,
        banks: Banks,
        rows: torch.Tensor,
        counters: Counters,
    ) -> None:
        self.shape = shape
        self.pool = pool
        self.banks = banks
        self.rows = rows
        self.counters = counters
        self._touch = touch_of(pool.policy)

    def prepare(self) -> None:
        """Before a step."""

    def finish(self) -> None:
        """Behind a step's last layer."""

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """The layer's output [T, H]."""
        ids = call.ids_TK.contiguous()
        row_of_E = self._admit(step, ids)
        activation = activation_of(call.module)
        assert activation is not None, "kernels were chosen for a gate they have no form for"
        activated = launch_gate_up(
            call.x_TH,
            ids,
            call.weights_TK.contiguous(),
            row_of_E,
            self.rows,
            self.shape,
            activation,
        )
        return launch_down(activated, self.rows, self.shape, call.residual_TH)

    def _admit(self, step: Step, ids: torch.Tensor) -> torch.Tensor:
        """Bring what the step lacks; int32 [E], the row of each expert of the layer."""
        pool, bank = self.pool, self.banks.layers[step.layer]
        totals = self.counters.gathered(step.layer, step.phase)
        if pool.may_decline(step) or ids.numel() > MAX_IDS:
            admission = pool.admit(ids.flatten(), step)
            totals += admission.counts
            self._touch(admission.unique, step)
            copies = copy_list(admission, step.layer, pool.space)
            launch_gather(bank, self.rows, *copies)
            row_of_E = pool.layer_slots(step.layer).clone()
            first = step.layer * pool.space.num_experts
            spare_E = torch.cat([row_of_E, row_of_E.new_zeros(1)])
            places = (admission.unique - first).clamp_(max=pool.space.num_experts)
            spare_E[places] = admission.rows.int()
            return spare_E[:-1]
        admitted = launch_admit(
            ids,
            step.layer,
            pool.space.num_experts,
            pool.slot_of,
            pool.id_of,
            pool.policy.keys,
            totals=totals,
        )
        self._touch(admitted.unique, step)
        launch_gather(
            bank, self.rows, admitted.copy_expert, admitted.copy_slot, admitted.num_copies
        )
        return pool.layer_slots(step.layer)
