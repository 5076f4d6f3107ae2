"""The shared expert behind its first projection, for few rows in one kernel.

A projection's row holds the router's logits, the shared expert's gate and up parts, and last how
much of the shared expert is taken. Further legend: R rows, F width of the expert, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.dense import FEW

_BLOCK_H = 8


def shared_expert(row_RW: Tensor, down_HF: Tensor) -> Tensor:
    """[R, H]: sigmoid(last) * (silu(gate) * up) @ down^T."""
    width = down_HF.shape[1]
    _, gate, up, part = row_RW.split([row_RW.shape[1] - 2 * width - 1, width, width, 1], -1)
    return torch.sigmoid(part) * F.linear(F.silu(gate) * up, down_HF)


@triton.jit
def _shared_kernel(
    row_ptr: tl.tensor, down_ptr: tl.tensor, out_ptr: tl.tensor, row_width: tl.tensor,
    hidden: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, WIDTH_PAD)[None, :]
    inside = c < WIDTH
    kept = h < hidden
    at = h.to(tl.int64)[:, None] * WIDTH + c
    down = tl.load(down_ptr + at, mask=kept[:, None] & inside, other=0.0)
    for r in tl.static_range(ROWS):
        own = row_ptr + r * row_width + row_width - 2 * WIDTH - 1
        gate = tl.load(own + c, mask=inside, other=0.0)
        up = tl.load(own + WIDTH + c, mask=inside, other=0.0)
        part = tl.load(own + 2 * WIDTH)
        wide = gate.to(tl.float32)
        opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
        act = (opened * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
        y = tl.sum(down.to(tl.float32) * act, axis=1).to(gate.dtype).to(tl.float32)
        share = (1.0 / (1.0 + tl.exp(-part.to(tl.float32)))).to(gate.dtype).to(tl.float32)
        tl.store(out_ptr + r * hidden + h, share * y, mask=kept)


def launch_shared_expert(row_RW: Tensor, down_HF: Tensor) -> Tensor:
    """Triton form of `shared_expert`; at most FEW rows, contiguous."""
    num_rows, row_width = row_RW.shape
    assert num_rows <= FEW, f"{num_rows} rows, but at most {FEW} are few"
    hidden, width = down_HF.shape
    out = row_RW.new_empty(num_rows, hidden)
    _shared_kernel[(triton.cdiv(hidden, _BLOCK_H),)](
        row_RW, down_HF, out, row_width, hidden, ROWS=num_rows, WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width), BLOCK_H=_BLOCK_H, num_warps=4,
    )  # fmt: skip
    return out
