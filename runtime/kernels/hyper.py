"""Hyper-connections: several residual streams, mixed into a block's input, and fed its output.

The streams lie side by side in a row [S * H]. A mixer norms each stream apart, weighs its elements
by a low-rank gate and takes the mean over the streams; how strongly a block's output goes into each
stream is another product with the normed row. What a block made waits beside the streams
(`Pending`) and is added where they are read next, so the addition needs no launch of its own.

For few rows a mixer is two kernels: products that recompute the norm behind their weights' loads,
then gate and mean. Longer chunks norm first and leave the products to matrix multiplications.

Further legend: R rows (tokens of all sequences), S streams, L rank, W = L + S or, at the model's
end, L, where nothing is injected any more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.dense import FEW

_BLOCK_H = 8


class Streams(NamedTuple):
    """Residual streams [R, S * H], and what the last block made but was not added yet."""

    rows_RC: Tensor
    pending_RH: Tensor | None = None
    inject_RS: Tensor | None = None  # raw: before scale and sigmoid; last stride 1


class Mixer(NamedTuple):
    """Weights of one mixer. `down_WC` holds the gate's rows, then those of the injection."""

    num_streams: int
    norm_C: Tensor
    eps: float
    down_WC: Tensor
    up_CL: Tensor

    @property
    def rank(self) -> int:
        return self.up_CL.shape[1]


class Mixed(NamedTuple):
    """A block's input, the streams without anything pending, and the raw injection weights."""

    x_RH: Tensor
    rows_RC: Tensor
    inject_RS: Tensor | None


def settle(streams: Streams, num_streams: int) -> Tensor:
    """The streams with what was pending added, [R, S * H]: each step rounded as the model does."""
    rows_RC, pending_RH, inject_RS = streams
    if pending_RH is None or inject_RS is None:
        return rows_RC
    strength_RS = 2 * torch.sigmoid(inject_RS / num_streams)
    added = pending_RH[:, None, :] * strength_RS[:, :, None]
    return rows_RC + added.flatten(1)


def group_norm(x_RC: Tensor, weight_C: Tensor, eps: float, num_streams: int) -> Tensor:
    """RMSNorm of each stream; its weight is stored less one. fp32, rounded once."""
    x = x_RC.float().unflatten(-1, (num_streams, -1))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed_RC: Tensor = x.flatten(-2) * (1.0 + weight_C.float())
    return normed_RC.to(x_RC.dtype)


def mix(streams: Streams, mixer: Mixer) -> Mixed:
    """One mixer over streams that may have something pending."""
    num_streams = mixer.num_streams
    rows_RC = settle(streams, num_streams)
    normed_RC = group_norm(rows_RC, mixer.norm_C, mixer.eps, num_streams)
    y_RW = F.linear(normed_RC, mixer.down_WC)
    gate_RL, inject_RS = y_RW[:, : mixer.rank], y_RW[:, mixer.rank :]
    up_RC = F.linear(F.silu(gate_RL / num_streams), mixer.up_CL)
    weighed_RC = torch.sigmoid(up_RC) * normed_RC
    x_RH = weighed_RC.unflatten(-1, (num_streams, -1)).mean(-2)
    return Mixed(x_RH, rows_RC, inject_RS if inject_RS.shape[1] else None)


@triton.jit
def settled(
    rows: tl.tensor, pending: tl.tensor, raw: tl.tensor, STREAMS: tl.constexpr
) -> tl.tensor:
    """Streams plus the pending output by its raw strength, tiles of one shape once broadcast."""
    dtype = rows.dtype
    scaled = (raw.to(tl.float32) / STREAMS).to(dtype).to(tl.float32)
    strength = (2.0 * (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)).to(dtype)
    added = (pending.to(tl.float32) * strength.to(tl.float32)).to(dtype)
    return (rows.to(tl.float32) + added.to(tl.float32)).to(dtype)


@triton.jit
def _down_kernel(
    rows_ptr: tl.tensor, pending_ptr: tl.tensor, inject_ptr: tl.tensor, norm_ptr: tl.tensor,
    down_ptr: tl.tensor, settled_ptr: tl.tensor, normed_ptr: tl.tensor, y_ptr: tl.tensor,
    inject_stride: tl.tensor, num_outputs: tl.tensor, eps: tl.tensor, ROWS: tl.constexpr,
    STREAMS: tl.constexpr, STREAMS_PAD: tl.constexpr, HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
) -> None:  # fmt: skip
    n = tl.program_id(0)
    s = tl.arange(0, STREAMS_PAD)[:, None]
    h = tl.arange(0, HIDDEN_PAD)[None, :]
    inside = (s < STREAMS) & (h < HIDDEN)
    c = s * HIDDEN + h
    SIZE: tl.constexpr = STREAMS * HIDDEN
    weight = tl.load(down_ptr + n.to(tl.int64) * SIZE + c, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + c, mask=inside, other=0.0)
    for row in tl.static_range(ROWS):
        x = tl.load(rows_ptr + row * SIZE + c, mask=inside, other=0.0)
        if pending_ptr is not None:
            pending = tl.load(pending_ptr + row * HIDDEN + h, mask=h < HIDDEN, other=0.0)
            raw = tl.load(inject_ptr + row * inject_stride + s, mask=s < STREAMS, other=0.0)
            x = tl.where(inside, settled(x, pending, raw, STREAMS), 0.0).to(x.dtype)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / HIDDEN + eps)
        normed = (wide * scale * (norm.to(tl.float32) + 1.0)).to(x.dtype)
        if n == 0:
            tl.store(normed_ptr + row * SIZE + c, normed, mask=inside)
            if pending_ptr is not None:
                tl.store(settled_ptr + row * SIZE + c, x, mask=inside)
        y = tl.sum(tl.sum(weight.to(tl.float32) * normed.to(tl.float32), axis=1), axis=0)
        tl.store(y_ptr + row * num_outputs + n, y)


@triton.jit
def _up_kernel(
    normed_ptr: tl.tensor, y_ptr: tl.tensor, up_ptr: tl.tensor, x_ptr: tl.tensor,
    num_outputs: tl.tensor, ROWS: tl.constexpr, STREAMS: tl.constexpr, STREAMS_PAD: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0) * BLOCK_H
    SIZE: tl.constexpr = STREAMS * HIDDEN
    # A tile's row is an element of one stream: [STREAMS_PAD * BLOCK_H, RANK_PAD].
    row_of = tl.arange(0, STREAMS_PAD * BLOCK_H)
    h = first + row_of % BLOCK_H
    s = row_of // BLOCK_H
    there = (s < STREAMS) & (h < HIDDEN)
    c = s * HIDDEN + h
    rank = tl.arange(0, RANK_PAD)[None, :]
    at = c.to(tl.int64)[:, None] * RANK + rank
    up = tl.load(up_ptr + at, mask=there[:, None] & (rank < RANK), other=0.0)
    for row in tl.static_range(ROWS):
        y = tl.load(y_ptr + row * num_outputs + rank, mask=rank < RANK, other=0.0)
        gate = (y.to(tl.float32) / STREAMS).to(y.dtype).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(y.dtype).to(tl.float32)
        product = tl.sum(up.to(tl.float32) * gate, axis=1).to(y.dtype).to(tl.float32)
        weigh = (1.0 / (1.0 + tl.exp(-product))).to(y.dtype).to(tl.float32)
        normed = tl.load(normed_ptr + row * SIZE + c, mask=there, other=0.0).to(tl.float32)
        weighed = tl.where(there, (weigh * normed).to(y.dtype).to(tl.float32), 0.0)
        x = tl.sum(tl.reshape(weighed, (STREAMS_PAD, BLOCK_H)), axis=0) / STREAMS
        out = first + tl.arange(0, BLOCK_H)
        tl.store(x_ptr + row * HIDDEN + out, x, mask=out < HIDDEN)


@triton.jit
def _settle_norm_kernel(
    rows_ptr: tl.tensor, pending_ptr: tl.tensor, inject_ptr: tl.tensor, norm_ptr: tl.tensor,
    settled_ptr: tl.tensor, normed_ptr: tl.tensor, inject_stride: tl.tensor, eps: tl.tensor,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    h = tl.arange(0, HIDDEN_PAD)
    inside = h < HIDDEN
    at = (row * STREAMS + s) * HIDDEN + h
    x = tl.load(rows_ptr + at, mask=inside, other=0.0)
    if pending_ptr is not None:
        pending = tl.load(pending_ptr + row * HIDDEN + h, mask=inside, other=0.0)
        raw = tl.load(inject_ptr + row * inject_stride + s)
        x = tl.where(inside, settled(x, pending, raw, STREAMS), 0.0).to(x.dtype)
        tl.store(settled_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    norm = tl.load(norm_ptr + s * HIDDEN + h, mask=inside, other=0.0).to(tl.float32) + 1.0
    tl.store(normed_ptr + at, wide * scale * norm, mask=inside)


@triton.jit
def _mean_kernel(
    up_ptr: tl.tensor, normed_ptr: tl.tensor, x_ptr: tl.tensor, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(STREAMS):
        at = (row * STREAMS + s) * HIDDEN + h
        up = tl.load(up_ptr + at, mask=inside, other=0.0)
        normed = tl.load(normed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        weigh = (1.0 / (1.0 + tl.exp(-up.to(tl.float32)))).to(up.dtype).to(tl.float32)
        total += (weigh * normed).to(up.dtype).to(tl.float32)
    tl.store(x_ptr + row * HIDDEN + h, total / STREAMS, mask=inside)


def launch_mix(streams: Streams, mixer: Mixer) -> Mixed:
    """Triton form of `mix`; contiguous, but for the rows of inject_RS, which may lie apart."""
    rows_RC, pending_RH, inject_RS = streams
    num_rows, size = rows_RC.shape
    count, rank, width = mixer.num_streams, mixer.rank, mixer.down_WC.shape[0]
    hidden = size // count
    out_RC = rows_RC if pending_RH is None else torch.empty_like(rows_RC)
    normed_RC = torch.empty_like(rows_RC)
    stride = 0 if inject_RS is None else inject_RS.stride(0)
    x_RH = rows_RC.new_empty(num_rows, hidden)
    hidden_pad = triton.next_power_of_2(hidden)
    if num_rows <= FEW:
        y_RW = rows_RC.new_empty(num_rows, width)
        streams_pad = triton.next_power_of_2(count)
        _down_kernel[(width,)](
            rows_RC, pending_RH, inject_RS, mixer.norm_C, mixer.down_WC, out_RC, normed_RC, y_RW,
            stride, width, mixer.eps, ROWS=num_rows, STREAMS=count, STREAMS_PAD=streams_pad,
            HIDDEN=hidden, HIDDEN_PAD=hidden_pad, num_warps=8,
        )  # fmt: skip
        _up_kernel[(triton.cdiv(hidden, _BLOCK_H),)](
            normed_RC, y_RW, mixer.up_CL, x_RH, width, ROWS=num_rows, STREAMS=count,
            STREAMS_PAD=streams_pad, HIDDEN=hidden, RANK=rank,
            RANK_PAD=triton.next_power_of_2(rank), BLOCK_H=_BLOCK_H, num_warps=8,
        )  # fmt: skip
    else:
        _settle_norm_kernel[(num_rows, count)](
            rows_RC, pending_RH, inject_RS, mixer.norm_C, out_RC, normed_RC, stride, mixer.eps,
            STREAMS=count, HIDDEN=hidden, HIDDEN_PAD=hidden_pad, num_warps=4,
        )  # fmt: skip
        y_RW = F.linear(normed_RC, mixer.down_WC)
        up_RC = F.linear(F.silu(y_RW[:, :rank] / count), mixer.up_CL)
        _mean_kernel[(num_rows, triton.cdiv(hidden, 1024))](
            up_RC, normed_RC, x_RH, STREAMS=count, HIDDEN=hidden, BLOCK=1024, num_warps=4
        )
    return Mixed(x_RH, out_RC, y_RW[:, rank:] if width > rank else None)
