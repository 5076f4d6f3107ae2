"""What precedes attention over selected keys: head norms, the rotary turn, writes to the caches.

A projection's row holds, in this order, per query head its query and its output gate, the key
heads, the value heads, the indexer's query heads and its one key. Norm weights are stored less one.
Only the first `turned` elements of a head are turned. The indexer's keys are kept as they are, and
as *blocks*: the mean of a few that follow one another, normed and turned to the first one's place.

Angles are looked up in a table of all positions. Caches are of one length, which the device scalar
`position` holds; nothing here synchronises with the host.

Further legend: B sequences, S tokens of a sequence in this step, W width of a projection's row, D
and I dims of a head and of an indexer's head, N query heads, M indexer's query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class IndexedHeads(NamedTuple):
    """Sizes and norm weights of one layer."""

    num_queries: int
    num_keys: int
    dim: int
    num_index: int
    index_dim: int
    block: int  # tokens of an index block
    q_D: Tensor
    k_D: Tensor
    index_q_I: Tensor
    index_k_I: Tensor
    eps: float

    @property
    def index_at(self) -> int:
        """Where the indexer's part of a row begins; gates lie behind their queries."""
        return (2 * self.num_queries + 2 * self.num_keys) * self.dim

    @property
    def width(self) -> int:
        return self.index_at + (self.num_index + 1) * self.index_dim


class Angles(NamedTuple):
    """Cosines and sines of all positions, [max length, turned elements], in the model's dtype."""

    cos: Tensor
    sin: Tensor


class IndexedCache(NamedTuple):
    """One layer's: keys and values [B, KV heads, max length, D], the indexer's keys [B, max
    length, I] and their blocks [B, max length / block, I]; the last two None where every key is
    selected whatever the length.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor | None
    blocks: Tensor | None


class Queries(NamedTuple):
    """Ready: [B, S, N, D] and [B, S, M, I]."""

    attention: Tensor
    indexer: Tensor


def prepare(
    row_BSW: Tensor, heads: IndexedHeads, angles: Angles, cache: IndexedCache, position: Tensor
) -> Queries:
    """Queries; writes keys and values at position, position + 1, ..., which is not advanced."""
    steps = row_BSW.shape[1]
    at = position + torch.arange(steps, device=row_BSW.device)
    cos, sin = (table[at][None, :, None] for table in angles)
    n, kv, dim = heads.num_queries, heads.num_keys, heads.dim
    both, keys, values, index = row_BSW.split(
        [2 * n * dim, kv * dim, kv * dim, row_BSW.shape[2] - heads.index_at], -1
    )
    q = unit_norm(both.unflatten(-1, (n, 2 * dim))[..., :dim], heads.q_D, heads.eps)
    k = unit_norm(keys.unflatten(-1, (kv, dim)), heads.k_D, heads.eps)
    index = index.unflatten(-1, (-1, heads.index_dim))
    index_q = unit_norm(index[:, :, : heads.num_index], heads.index_q_I, heads.eps)
    cache.keys.index_copy_(2, at, turn_first(k, cos, sin).transpose(1, 2))
    cache.values.index_copy_(2, at, values.unflatten(-1, (kv, dim)).transpose(1, 2))
    if cache.index_keys is not None and cache.blocks is not None:
        cache.index_keys.index_copy_(1, at, index[:, :, heads.num_index])
        _update_blocks(heads, angles, cache.index_keys, cache.blocks, position, steps)
    return Queries(turn_first(q, cos, sin), turn_first(index_q, cos, sin))


def _update_blocks(
    heads: IndexedHeads, angles: Angles, kept: Tensor, blocks: Tensor, position: Tensor, steps: int
) -> None:
    """Every block with a token of this step; one that is not complete yet is never read."""
    begin = int(position)
    first, last = begin // heads.block, min((begin + steps - 1) // heads.block + 1, blocks.shape[1])
    members = kept[:, first * heads.block : last * heads.block]
    mean = members.unflatten(1, (-1, heads.block)).float().mean(2).to(kept.dtype)
    normed = unit_norm(mean, heads.index_k_I, heads.eps)
    starts = torch.arange(first, last, device=kept.device) * heads.block
    cos, sin = (table[starts][None] for table in angles)
    blocks[:, first:last] = turn_first(normed, cos, sin)


def unit_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm whose weight is stored less one, rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight_D.float())).to(x.dtype)


def turn_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary turn of the first elements of each head, the rest as they are."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


@triton.jit
def _norm_and_turn(
    x: tl.tensor, partner: tl.tensor, weight: tl.tensor, partner_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, d: tl.tensor, eps: tl.tensor, DIM: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Heads [R, DIM]; a partner is the element half the turned part away."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / DIM + eps)
    normed = (wide * scale * (weight.to(tl.float32) + 1.0)).to(x.dtype)
    other = partner.to(tl.float32) * scale * (partner_weight.to(tl.float32) + 1.0)
    other = other.to(x.dtype).to(tl.float32) * sin.to(tl.float32)
    other = tl.where(d < TURNED // 2, -other, other).to(x.dtype).to(tl.float32)
    kept = (normed.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    return tl.where(d < TURNED, (kept + other).to(x.dtype), normed)


@triton.jit
def _prepare_kernel(
    row_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, iq_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor,
    index_keys_ptr: tl.tensor, position_ptr: tl.tensor, q_ptr: tl.tensor, iq_ptr: tl.tensor,
    eps: tl.tensor, num_steps: tl.tensor, max_length: tl.tensor, NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr, D: tl.constexpr, NUM_INDEX: tl.constexpr, I_DIM: tl.constexpr,
    INDEX_PAD: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    step = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    token = batch * num_steps + step
    at = tl.load(position_ptr).to(tl.int32) + step
    kept_end = tl.where(at < max_length, D + I_DIM, 0)  # no element is kept past the cache's end
    turned_end = tl.where(at < max_length, TURNED, 0)
    base = row_ptr + token * WIDTH
    HALF: tl.constexpr = TURNED // 2
    if tl.program_id(1) < tl.num_programs(1) - 1:
        head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
        d = tl.arange(0, D)[None, :]
        partner_d = tl.where(d < HALF, d + HALF, tl.where(d < TURNED, d - HALF, d))
        is_q = head < NUM_Q
        is_k = (head >= NUM_Q) & (head < NUM_Q + NUM_KV)
        is_v = (head >= NUM_Q + NUM_KV) & (head < NUM_Q + 2 * NUM_KV)
        row = base + tl.where(is_q, 2 * head, NUM_Q + head) * D
        x = tl.load(row + d, mask=is_q | is_k | is_v, other=0.0)
        partner = tl.load(row + partner_d, mask=is_q | is_k, other=0.0)
        weight = tl.where(is_q, tl.load(q_weight_ptr + d), tl.load(k_weight_ptr + d))
        partner_weight = tl.where(
            is_q, tl.load(q_weight_ptr + partner_d), tl.load(k_weight_ptr + partner_d)
        )
        angle = at.to(tl.int64) * TURNED + d
        cos = tl.load(cos_ptr + angle, mask=d < turned_end, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=d < turned_end, other=0.0)
        turned = _norm_and_turn(x, partner, weight, partner_weight, cos, sin, d, eps, D, TURNED)
        tl.store(q_ptr + (token * NUM_Q + head) * D + d, turned, mask=is_q)
        key_row = ((batch * NUM_KV + head - NUM_Q) * max_length + at) * D
        tl.store(keys_ptr + key_row + d, turned, mask=is_k & (d < kept_end))
        value_row = ((batch * NUM_KV + head - NUM_Q - NUM_KV) * max_length + at) * D
        tl.store(values_ptr + value_row + d, x, mask=is_v & (d < kept_end))
    elif index_keys_ptr is not None:
        _prepare_index(
            base + (2 * NUM_Q + 2 * NUM_KV) * D, iq_weight_ptr,
            cos_ptr + at.to(tl.int64) * TURNED, sin_ptr + at.to(tl.int64) * TURNED,
            index_keys_ptr + (batch * max_length + at) * I_DIM,
            iq_ptr + token * NUM_INDEX * I_DIM, eps, kept_end, turned_end, NUM_INDEX, I_DIM,
            INDEX_PAD, TURNED,
        )  # fmt: skip


@triton.jit
def _prepare_index(
    row_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    key_ptr: tl.tensor, q_ptr: tl.tensor, eps: tl.tensor, kept_end: tl.tensor,
    turned_end: tl.tensor, NUM_INDEX: tl.constexpr, I_DIM: tl.constexpr, INDEX_PAD: tl.constexpr,
    TURNED: tl.constexpr,
) -> None:  # fmt: skip
    """The indexer's part of one token's row; its key is kept as it is."""
    HALF: tl.constexpr = TURNED // 2
    head = tl.arange(0, INDEX_PAD)[:, None]
    d = tl.arange(0, I_DIM)[None, :]
    partner_d = tl.where(d < HALF, d + HALF, tl.where(d < TURNED, d - HALF, d))
    x = tl.load(row_ptr + head * I_DIM + d, mask=head <= NUM_INDEX, other=0.0)
    partner = tl.load(row_ptr + head * I_DIM + partner_d, mask=head < NUM_INDEX, other=0.0)
    cos = tl.load(cos_ptr + d, mask=d < turned_end, other=0.0)
    sin = tl.load(sin_ptr + d, mask=d < turned_end, other=0.0)
    weight = tl.load(weight_ptr + d)
    partner_weight = tl.load(weight_ptr + partner_d)
    turned = _norm_and_turn(x, partner, weight, partner_weight, cos, sin, d, eps, I_DIM, TURNED)
    tl.store(q_ptr + head * I_DIM + d, turned, mask=head < NUM_INDEX)
    own_key = key_ptr + (head - NUM_INDEX) * I_DIM + d
    tl.store(own_key, x, mask=(head == NUM_INDEX) & (d < kept_end))


@triton.jit
def _blocks_kernel(
    index_keys_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    blocks_ptr: tl.tensor, position_ptr: tl.tensor, eps: tl.tensor, num_steps: tl.tensor,
    max_length: tl.tensor, num_blocks: tl.tensor, I_DIM: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    begin = tl.load(position_ptr).to(tl.int32)
    block = begin // BLOCK + tl.program_id(0)
    inside = tl.where(block * BLOCK < begin + num_steps, block, num_blocks) < num_blocks
    d = tl.arange(0, I_DIM)[None, :]
    HALF: tl.constexpr = TURNED // 2
    partner_d = tl.where(d < HALF, d + HALF, tl.where(d < TURNED, d - HALF, d))
    there = d < tl.where(inside, I_DIM, 0)
    turned_end = tl.where(inside, TURNED, 0)
    total = tl.zeros((1, I_DIM), tl.float32)
    partner = tl.zeros((1, I_DIM), tl.float32)
    for member in tl.static_range(BLOCK):
        row = index_keys_ptr + (batch * max_length + block * BLOCK + member) * I_DIM
        total += tl.load(row + d, mask=there, other=0.0).to(tl.float32)
        partner += tl.load(row + partner_d, mask=there, other=0.0).to(tl.float32)
    dtype = blocks_ptr.dtype.element_ty
    angle = block.to(tl.int64) * BLOCK * TURNED + d
    cos = tl.load(cos_ptr + angle, mask=d < turned_end, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=d < turned_end, other=0.0)
    turned = _norm_and_turn(
        (total / BLOCK).to(dtype), (partner / BLOCK).to(dtype), tl.load(weight_ptr + d),
        tl.load(weight_ptr + partner_d), cos, sin, d, eps, I_DIM, TURNED,
    )  # fmt: skip
    tl.store(blocks_ptr + (batch * num_blocks + block) * I_DIM + d, turned, mask=there)


_HEADS_PER_PROGRAM = 4


def launch_prepare(
    row_BSW: Tensor, heads: IndexedHeads, angles: Angles, cache: IndexedCache, position: Tensor
) -> Queries:
    """Triton form of `prepare`; D and I powers of two, all tensors contiguous.

    The indexer's queries are left unwritten where the cache has no place for its keys.
    """
    batch, steps, width = row_BSW.shape
    q = row_BSW.new_empty(batch, steps, heads.num_queries, heads.dim)
    index_q = row_BSW.new_empty(batch, steps, heads.num_index, heads.index_dim)
    max_length, turned = cache.keys.shape[2], angles.cos.shape[1]
    groups = triton.cdiv(heads.num_queries + 2 * heads.num_keys, _HEADS_PER_PROGRAM)
    _prepare_kernel[(steps, groups + 1, batch)](
        row_BSW, heads.q_D, heads.k_D, heads.index_q_I, *angles, cache.keys, cache.values,
        cache.index_keys, position, q, index_q, heads.eps, steps, max_length,
        NUM_Q=heads.num_queries, NUM_KV=heads.num_keys, D=heads.dim, NUM_INDEX=heads.num_index,
        I_DIM=heads.index_dim, INDEX_PAD=triton.next_power_of_2(heads.num_index + 1), TURNED=turned,
        BLOCK=_HEADS_PER_PROGRAM, WIDTH=width, num_warps=4,
    )  # fmt: skip
    if cache.index_keys is not None and cache.blocks is not None:
        touched = (steps - 1) // heads.block + 2
        _blocks_kernel[(touched, batch)](
            cache.index_keys, heads.index_k_I, *angles, cache.blocks, position, heads.eps, steps,
            max_length, cache.blocks.shape[1], I_DIM=heads.index_dim, TURNED=turned,
            BLOCK=heads.block, num_warps=1,
        )  # fmt: skip
    return Queries(q, index_q)
