"""Kernels behind the runtime's interfaces: the fast forms of expert maths and of a decode step.

Equal to `experts.py`, `admission.py` and `decode.py` in what they compute and count; see
`kernels/` for each kernel beside its definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from residency.policies.step import Step
from residency.runtime.admission import copy_list
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters
from residency.runtime.experts import Call
from residency.runtime.kernels.activations import SILU, Activation
from residency.runtime.kernels.admission import MAX_IDS, launch_admit
from residency.runtime.kernels.decode_experts import launch_down, launch_gate_up
from residency.runtime.kernels.formats import ExpertShape, Plain
from residency.runtime.kernels.gather import launch_gather
from residency.runtime.kernels.grouped_gemm import launch_combine, launch_run_group
from residency.runtime.kernels.grouping import launch_group_pairs
from residency.runtime.kernels.touch import touch_of
from residency.runtime.layout import RowLayout
from residency.runtime.slots import SlotPool


def kernel_shape(layout: RowLayout, module: Any) -> ExpertShape | None:
    """The kernels' view of a row, or None where they have no form for its layout or gate."""
    return None if activation_of(module) is None else _expert_shape(layout)


def _expert_shape(layout: RowLayout) -> ExpertShape | None:
    if [part.name for part in layout.parts] != ["gate_up_proj", "down_proj"]:
        return None
    (two_width, hidden), (out, width) = (part.shape for part in layout.parts)
    if (out, two_width) != (hidden, 2 * width):
        return None
    shape = ExpertShape(hidden, width, Plain(layout.parts[0].dtype))
    return shape if shape.row_bytes == layout.row_bytes else None


def activation_of(module: Any) -> Activation | None:
    """The gate of an experts module, or None where the kernels have no form for it."""
    plain_gate = type(module)._apply_gate.__name__ == "_default_apply_gate"
    name = type(module.act_fn).__name__
    return SILU if plain_gate and name in ("SiLU", "SiLUActivation") else None


class FusedWork:
    """One call, grouped by expert; results wait in sorted order until they are combined."""

    def __init__(self, call: Call, shape: ExpertShape, num_experts: int) -> None:
        self.call = call
        self.grouping = launch_group_pairs(call.ids_TK.contiguous(), num_experts)
        num_pairs = call.ids_TK.numel()
        self.act_PI = call.x_TH.new_empty(num_pairs, shape.width)
        self.y_PH = call.x_TH.new_empty(num_pairs, shape.hidden)

    def combined(self) -> torch.Tensor:
        call = self.call
        return launch_combine(
            self.y_PH, self.grouping, call.weights_TK.contiguous(), call.residual_TH
        )


class FusedMaths:
    """Grouped GEMM kernels over rows of the device."""

    def __init__(self, shape: ExpertShape, rows: torch.Tensor, num_experts: int) -> None:
        self.shape = shape
        self.rows = rows
        self.num_experts = num_experts
        self._lists = lru_cache(maxsize=4096)(self._upload)

    def begin(self, call: Call) -> FusedWork:
        return FusedWork(call, self.shape, self.num_experts)

    def run(self, work: FusedWork, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Fill the results of every pair routed to `experts`, which lie in `rows`."""
        experts_G, row_of_E = self._lists(tuple(experts), tuple(rows))
        activation = activation_of(work.call.module)
        assert activation is not None, "kernels were chosen for a gate they have no form for"
        launch_run_group(
            work.call.x_TH,
            work.grouping,
            experts_G,
            row_of_E,
            self.rows,
            self.shape,
            activation,
            work.act_PI,
            work.y_PH,
        )

    def _upload(
        self, experts: tuple[int, ...], rows: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int32 [G] and their rows int32 [E] on the device, in one copy."""
        num = len(experts)
        both = np.full(num + self.num_experts, -1, dtype=np.int32)
        both[:num] = experts
        both[num:][both[:num]] = rows
        on_device = torch.from_numpy(both).to(self.rows.device, non_blocking=True)
        return on_device[:num], on_device[num:]


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
