"""Kernels behind the interface of `experts`: the fast form of expert maths over a chunk.

Equal to `experts.py` in what it computes; see `kernels/` for each kernel beside its definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from residency.runtime import formats
from residency.runtime.experts import Call
from residency.runtime.fused_chunk import ChunkWork, ShortChunks
from residency.runtime.kernels.activations import SILU, Activation
from residency.runtime.kernels.formats import ExpertShape, Plain
from residency.runtime.layout import RowLayout


def kernel_shape(layout: RowLayout, module: Any) -> ExpertShape | None:
    """The kernels' view of a row, or None where they have no form for its layout or gate."""
    return None if activation_of(module) is None else _expert_shape(layout)


def _expert_shape(layout: RowLayout) -> ExpertShape | None:
    if [part.name for part in layout.parts] != ["gate_up_proj", "down_proj"]:
        return None
    if layout.format != formats.Plain(layout.parts[0].dtype):
        return None
    (two_width, hidden), (out, width) = (part.shape for part in layout.parts)
    if (out, two_width) != (hidden, 2 * width):
        return None
    shape = ExpertShape(hidden, width, Plain(layout.parts[0].dtype))
    return shape if shape.row_bytes == layout.row_bytes else None


def activation_of(module: Any) -> Activation | None:
    """The gate of an experts module, or None where the kernels have no form for it."""
    plain_gate = type(module)._apply_gate.__name__ == "_default_apply_gate"
    name = type(getattr(module, "act_fn", None)).__name__
    return SILU if plain_gate and name in ("SiLU", "SiLUActivation") else None


class FusedMaths:
    """Grouped GEMM kernels over rows of the device."""

    def __init__(self, shape: ExpertShape, rows: torch.Tensor, num_experts: int) -> None:
        self.shape = shape
        self.rows = rows
        self.num_experts = num_experts
        self._lists = lru_cache(maxsize=4096)(self._upload)
        self._short = ShortChunks(shape, rows, num_experts)

    def begin(self, call: Call, slots_E: torch.Tensor | None = None) -> ChunkWork:
        activation = activation_of(call.module)
        assert activation is not None, "kernels were chosen for a gate they have no form for"
        if (short := self._short.work(call, activation, slots_E)) is not None:
            return short
        work = ChunkWork.of(call, activation, self.shape, self.num_experts)
        if slots_E is not None:
            residents = slots_E.ge(0).nonzero().flatten()
            self.run(work, residents.tolist(), slots_E[residents].tolist())
            work.has_residents = True
        return work

    def run(self, work: ChunkWork, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Fill the results of every pair routed to `experts`, which lie in `rows`."""
        experts_G, row_of_E = self._lists(tuple(experts), tuple(rows))
        work.run(experts_G, row_of_E, self.rows, self.shape)

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
