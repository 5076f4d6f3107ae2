"""What precedes attention in a chunk: head norms, the rotary turn, the write to the cache.

The fused projection `qkv` holds, per token, the query heads, then the key heads, then the value
heads. A query or key head passes an RMSNorm of its own and a rotary turn, both rounded where
transformers rounds them. Caches are [B, KV heads, max length, D] and of one length, which the
device scalar `position` holds: no launch here synchronises with the host. A padded chunk holds in
the device scalar `rows` how many of its S tokens are real; only their keys and values are kept.

Further legend: B sequences, S tokens of a sequence in this step, W width of qkv, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.dense import rms_norm

_HEADS_PER_PROGRAM = 8


class HeadNorms(NamedTuple):
    """Norm weights [D] of query and key heads."""

    q_D: Tensor
    k_D: Tensor
    eps: float


class KeyValues(NamedTuple):
    """One layer's static cache, contiguous: [B, KV heads, max length, D] twice."""

    keys: Tensor
    values: Tensor

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def dim(self) -> int:
        return self.keys.shape[-1]


def rotate_and_store(
    qkv_BSW: Tensor,
    norms: HeadNorms,
    cos_BSD: Tensor,
    sin_BSD: Tensor,
    cache: KeyValues,
    position: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Queries [B, S, query heads, D], ready; writes keys and values at position, position + 1, ...

    cos and sin [B or 1, S, D] in the model's dtype; position int [], not advanced. rows int []:
    only so many tokens are written; all S without it.
    """
    batch, steps, width = qkv_BSW.shape
    num_kv, dim = cache.num_heads, cache.dim
    heads = qkv_BSW.view(batch, steps, width // dim, dim)
    q, k, v = heads.split([width // dim - 2 * num_kv, num_kv, num_kv], dim=2)
    cos, sin = cos_BSD[:, :, None], sin_BSD[:, :, None]
    real = steps if rows is None else int(rows)
    at = position + torch.arange(real, device=position.device)
    keys = _turned(k, norms.k_D, norms.eps, cos, sin)
    cache.keys.index_copy_(2, at, keys[:, :real].transpose(1, 2))
    cache.values.index_copy_(2, at, v[:, :real].transpose(1, 2))
    return _turned(q, norms.q_D, norms.eps, cos, sin)


def _turned(x: Tensor, weight_D: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    normed = rms_norm(x, weight_D, eps)
    first, second = normed.chunk(2, dim=-1)
    return normed * cos + torch.cat((-second, first), dim=-1) * sin


@triton.jit
def turn(
    x: tl.tensor, partner: tl.tensor, weight: tl.tensor, partner_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, d: tl.tensor, eps: tl.tensor, DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Norm and rotary turn of heads [R, DIM]; a partner is the element half a head away."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / DIM + eps)
    wide = weight.to(tl.float32) * (wide * scale).to(x.dtype).to(tl.float32)
    other = (partner.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
    other = partner_weight.to(tl.float32) * other
    wide = wide.to(x.dtype).to(tl.float32) * cos.to(tl.float32)
    other = other.to(x.dtype).to(tl.float32) * sin.to(tl.float32)
    other = tl.where(d < DIM // 2, -other, other)
    return (wide.to(x.dtype).to(tl.float32) + other.to(x.dtype).to(tl.float32)).to(x.dtype)


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, position_ptr: tl.tensor,
    rows_ptr: tl.tensor, q_ptr: tl.tensor, eps: tl.tensor, num_steps: tl.tensor,
    max_length: tl.tensor, cos_stride: tl.tensor, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    step = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, DIM)[None, :]
    partner_d = (d + DIM // 2) % DIM
    is_q = head < NUM_Q
    is_k = (head >= NUM_Q) & (head < NUM_Q + NUM_KV)
    is_v = (head >= NUM_Q + NUM_KV) & (head < NUM_Q + 2 * NUM_KV)
    token = batch * num_steps + step
    row = qkv_ptr + (token * (NUM_Q + 2 * NUM_KV) + head) * DIM
    x = tl.load(row + d, mask=is_q | is_k | is_v, other=0.0)
    partner = tl.load(row + partner_d, mask=is_q | is_k, other=0.0)
    q_weight = tl.load(q_weight_ptr + d)
    k_weight = tl.load(k_weight_ptr + d)
    weight = tl.where(is_q, q_weight, k_weight)
    partner_weight = tl.where(
        is_q, tl.load(q_weight_ptr + partner_d), tl.load(k_weight_ptr + partner_d)
    )
    cos = tl.load(cos_ptr + batch * cos_stride + step * DIM + d)
    sin = tl.load(sin_ptr + batch * cos_stride + step * DIM + d)
    turned = turn(x, partner, weight, partner_weight, cos, sin, d, eps, DIM)
    tl.store(q_ptr + (token * NUM_Q + head) * DIM + d, turned, mask=is_q)
    begin = tl.load(position_ptr).to(tl.int32)
    at = begin + step
    end = max_length
    if rows_ptr is not None:
        end = tl.minimum(max_length, begin + tl.load(rows_ptr).to(tl.int32))
    kept = d < tl.where(at < end, DIM, 0)
    key_head = head - NUM_Q
    key_row = ((batch * NUM_KV + key_head) * max_length + at) * DIM
    tl.store(keys_ptr + key_row + d, turned, mask=is_k & kept)
    value_row = ((batch * NUM_KV + key_head - NUM_KV) * max_length + at) * DIM
    tl.store(values_ptr + value_row + d, x, mask=is_v & kept)


def launch_rotate_and_store(
    qkv_BSW: Tensor,
    norms: HeadNorms,
    cos_BSD: Tensor,
    sin_BSD: Tensor,
    cache: KeyValues,
    position: Tensor,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Triton form of `rotate_and_store`; D a power of two, all tensors contiguous.

    out: where the queries go instead of into a new tensor.
    """
    batch, steps, width = qkv_BSW.shape
    num_kv, dim = cache.num_heads, cache.dim
    num_q = width // dim - 2 * num_kv
    q = qkv_BSW.new_empty(batch, steps, num_q, dim) if out is None else out
    grid = (steps, triton.cdiv(num_q + 2 * num_kv, _HEADS_PER_PROGRAM), batch)
    _rotate_and_store_kernel[grid](
        qkv_BSW, norms.q_D, norms.k_D, cos_BSD, sin_BSD, *cache, position, rows, q,
        norms.eps, steps, cache.keys.shape[2], batch_stride(cos_BSD),
        NUM_Q=num_q, NUM_KV=num_kv, DIM=dim, BLOCK=_HEADS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return q


def batch_stride(angles: Tensor) -> int:
    return angles.stride(0) if angles.shape[0] > 1 else 0
