"""What embeddings of n-grams add to the residual streams, up to the convolution.

A token's embeddings give one key a stream and one value. Each stream, normed, is held against its
key, and the root of their product, squashed, says how much of the value the stream takes.

Further legend: R rows (tokens of all sequences), S streams, H hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.hyper import group_norm


class Gate(NamedTuple):
    """Norm weights [S * H], stored less one."""

    num_streams: int
    key_C: Tensor
    query_C: Tensor
    conv_C: Tensor
    eps: float


class Gated(NamedTuple):
    """The gated value of each stream [R, S * H], and its norm, which the convolution reads."""

    value_RC: Tensor
    normed_RC: Tensor


def gate_values(row_RW: Tensor, streams_RC: Tensor, gate: Gate) -> Gated:
    """row_RW: the keys [S * H], then the value [H]."""
    size, num = streams_RC.shape[1], gate.num_streams
    keys_RC, value_RH = row_RW.split([size, size // num], -1)
    keys = group_norm(keys_RC, gate.key_C, gate.eps, num).unflatten(-1, (num, -1))
    queries = group_norm(streams_RC, gate.query_C, gate.eps, num).unflatten(-1, (num, -1))
    product = (keys * queries).sum(-1, keepdim=True) / math.sqrt(size // num)
    root = product.abs().clamp_min(1e-6).sqrt() * product.sign()
    value_RC = (torch.sigmoid(root) * value_RH[:, None]).flatten(1)
    return Gated(value_RC, group_norm(value_RC, gate.conv_C, gate.eps, num))


@triton.jit
def _gate_kernel(
    row_ptr: tl.tensor, streams_ptr: tl.tensor, key_norm_ptr: tl.tensor, query_norm_ptr: tl.tensor,
    conv_norm_ptr: tl.tensor, value_ptr: tl.tensor, normed_ptr: tl.tensor, eps: tl.tensor,
    root: tl.tensor, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    h = tl.arange(0, HIDDEN_PAD)
    inside = h < HIDDEN
    row = row_ptr + r * (STREAMS + 1) * HIDDEN
    at = (r * STREAMS + s) * HIDDEN + h
    own = s * HIDDEN + h
    key = tl.load(row + own, mask=inside, other=0.0)
    query = tl.load(streams_ptr + at, mask=inside, other=0.0)
    value = tl.load(row + STREAMS * HIDDEN + h, mask=inside, other=0.0)
    dtype = key.dtype
    key = _normed(key, key_norm_ptr, own, inside, eps, HIDDEN)
    query = _normed(query, query_norm_ptr, own, inside, eps, HIDDEN)
    product = (key.to(tl.float32) * query.to(tl.float32)).to(dtype).to(tl.float32)
    product = tl.sum(product, axis=0).to(dtype).to(tl.float32)
    product = (product / root).to(dtype).to(tl.float32)
    size = tl.sqrt(tl.maximum(tl.abs(product), 1e-6)).to(dtype).to(tl.float32)
    signed = tl.where(product > 0, size, tl.where(product < 0, -size, 0.0))
    part = (1.0 / (1.0 + tl.exp(-signed))).to(dtype).to(tl.float32)
    value = (part * value.to(tl.float32)).to(dtype)
    tl.store(value_ptr + at, value, mask=inside)
    tl.store(normed_ptr + at, _normed(value, conv_norm_ptr, own, inside, eps, HIDDEN), mask=inside)


@triton.jit
def _normed(
    x: tl.tensor, norm_ptr: tl.tensor, own: tl.tensor, inside: tl.tensor, eps: tl.tensor,
    HIDDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    weight = tl.load(norm_ptr + own, mask=inside, other=0.0).to(tl.float32) + 1.0
    return (wide * scale * weight).to(x.dtype)


def launch_gate_values(row_RW: Tensor, streams_RC: Tensor, gate: Gate) -> Gated:
    """Triton form of `gate_values`; contiguous."""
    num_rows, size = streams_RC.shape
    hidden = size // gate.num_streams
    out = Gated(torch.empty_like(streams_RC), torch.empty_like(streams_RC))
    _gate_kernel[(num_rows, gate.num_streams)](
        row_RW, streams_RC, gate.key_C, gate.query_C, gate.conv_C, *out, gate.eps,
        math.sqrt(hidden), STREAMS=gate.num_streams, HIDDEN=hidden,
        HIDDEN_PAD=triton.next_power_of_2(hidden), num_warps=4,
    )  # fmt: skip
    return out
