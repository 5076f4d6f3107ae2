"""Kernels behind the interface of `experts`: the fast form of expert maths over a chunk.

Equal to `experts.py` in what it computes; see `kernels/` for each kernel beside its definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from residency.runtime.experts import Call
from residency.runtime.formats import OUTER, Plain
from residency.runtime.fused_chunk import ChunkWork, ShortChunks
from residency.runtime.kernels.activations import (
    GELU_ERF,
    GELU_TANH,
    SILU,
    Activation,
    clamped_swiglu,
)
from residency.runtime.kernels.formats import DOWN, GATE_UP, ExpertShape
from residency.runtime.kernels.loads import loads_of
from residency.runtime.layout import RowLayout

ALIGNED = 4  # int32 elements; a kernel is compiled anew for a pointer that 16 does not divide

# By the class of a module's act_fn.
GATES = {
    "SiLU": SILU,
    "SiLUActivation": SILU,
    "GELUActivation": GELU_ERF,
    "GELUTanh": GELU_TANH,
}


def kernel_shape(layout: RowLayout, module: Any) -> ExpertShape | None:
    """The kernels' view of a row, or None where they have no form for its layout or gate."""
    matrices = [part.name for part in layout.parts if part.name in (GATE_UP, DOWN)]
    if matrices != [GATE_UP, DOWN] or activation_of(module) is None:
        return None
    if loads_of(layout.format) is None:
        return None
    down = next(part.shape for part in layout.parts if part.name == DOWN)
    hidden, width = _extent(layout, down)
    shape = ExpertShape(hidden, width, layout, not module.is_concatenated)
    expected = ExpertShape.of(
        hidden,
        width,
        layout.format,
        layout.parts[-1].dtype,
        interleaved=shape.interleaved,
        has_bias=module.has_bias,
        transposed=module.is_transposed,
    )
    if shape != expected:
        return None
    # Their outer factors belong to the halves of a matrix, not to alternate rows.
    has_outer = OUTER in layout.suffixes(GATE_UP)
    return None if shape.interleaved and has_outer else shape


def _extent(layout: RowLayout, down: tuple[int, ...]) -> tuple[int, int]:
    """Hidden and width, found in the stored shape of down's elements."""
    rows, columns = down
    if isinstance(layout.format, Plain):
        return (columns, rows) if layout.format.transposed else (rows, columns)
    per_byte = layout.format.stored(1, 32)[0].shape[1]
    return rows, columns * 32 // per_byte


def activation_of(module: Any) -> Activation | None:
    """The gate of an experts module, or None where the kernels have no form for it."""
    own = type(module)
    if own.__name__ == "GptOssExperts":
        return clamped_swiglu(module.alpha, module.limit)
    if own._apply_gate.__name__ != "_default_apply_gate":
        return None
    return GATES.get(type(module.act_fn).__name__)


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
        return work

    def run(self, work: ChunkWork, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Fill the results of every pair routed to `experts`, which lie in `rows`."""
        if work.form is not None:
            self._short.run(work, experts, rows)
            return
        experts_G, row_of_E = self._lists(tuple(experts), tuple(rows))
        work.run(experts_G, row_of_E, self.rows, self.shape)

    def _upload(
        self, experts: tuple[int, ...], rows: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int32 [G] and their rows int32 [E] on the device, in one copy."""
        start = -(-self.num_experts // ALIGNED) * ALIGNED
        both = np.full(start + len(experts), -1, dtype=np.int32)
        both[start:] = experts
        both[both[start:]] = rows
        on_device = torch.from_numpy(both).to(self.rows.device, non_blocking=True)
        return on_device[start:], on_device[: self.num_experts]
