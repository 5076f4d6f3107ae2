"""Attention over selected blocks of keys in a static cache: of one token, and of a chunk.

One token's kernel walks a list of blocks, the open block last, cut into as many splits whatever
its length, so that the grid is fixed and nothing asks the host. A second kernel adds the splits and
applies the output gate. A chunk's kernel walks all keys before its queries under a mask of blocks.

Further legend: B sequences, S tokens of a sequence in this step, N query heads, D head dim, P
blocks, K selected ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.rotary import KeyValues

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16
_LOW = tl.constexpr(-1.0e30)  # below every score; finite, so that differences stay numbers
SPLITS = 32
TILE = 32  # keys of a split's step
QUERY_TILE = 64
ALL = 1 << 30  # a budget that no context reaches


def attend_selected(
    q_BSND: Tensor, cache: KeyValues, begin: int, block: int, mask_BSP: Tensor | None
) -> Tensor:
    """[B, S, N, D]: causal attention to the blocks of the mask and the open block, or to all.

    begin: tokens in the cache before this step's, whose keys are there as well.
    """
    batch, steps, _, dim = q_BSND.shape
    end = begin + steps
    at = torch.arange(begin, end, device=q_BSND.device)[:, None]
    n = torch.arange(end, device=q_BSND.device)[None, :]
    visible = (n <= at).expand(batch, -1, -1)
    if mask_BSP is not None:
        padded = torch.nn.functional.pad(mask_BSP, (0, end // block + 1 - mask_BSP.shape[2]))
        chosen = padded.repeat_interleave(block, dim=2)[:, :, :end]
        visible = visible & (chosen | (n >= (at + 1) // block * block))
    q = q_BSND.transpose(1, 2).unflatten(1, (cache.num_heads, -1)).float()
    scores = q @ cache.keys[:, :, None, :end].float().mT * dim**-0.5
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(-1) @ cache.values[:, :, None, :end].float()
    return out.flatten(1, 2).transpose(1, 2).to(q_BSND.dtype)


def gated(out_BSND: Tensor, row_BSW: Tensor) -> Tensor:
    """[B, S, N * D]: times the sigmoid of the gates, which lie behind their queries in a row."""
    num_heads, dim = out_BSND.shape[2:]
    both = row_BSW[..., : 2 * num_heads * dim].unflatten(-1, (num_heads, 2 * dim))
    return (out_BSND * torch.sigmoid(both[..., dim:])).flatten(-2)


@triton.jit
def _one_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, selected_ptr: tl.tensor,
    position_ptr: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor, scale: tl.tensor,
    max_length: tl.tensor, budget: tl.tensor, stats_stride: tl.tensor, NUM_KV: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    group = batch * NUM_KV + kv_head
    position = tl.load(position_ptr).to(tl.int32)
    complete = (position + 1) // BLOCK
    count = tl.minimum(complete, budget)
    PER_TILE: tl.constexpr = TILE // BLOCK
    per_split = tl.cdiv(tl.cdiv(count + 1, SPLITS), PER_TILE) * PER_TILE
    begin = split * per_split
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)[None, :]
    at_q = (group * HEADS + row[:, None]) * DIM + d
    q = tl.load(q_ptr + at_q, mask=row[:, None] < HEADS, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    best = tl.full((ROWS,), _LOW, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(begin, tl.minimum(begin + per_split, count + 1), PER_TILE):
        lane = tl.arange(0, TILE)
        entry = start + lane // BLOCK
        block = tl.where(entry < count, entry, complete)
        if selected_ptr is not None:
            chosen = tl.load(selected_ptr + batch * budget + entry, mask=entry < count, other=0)
            block = tl.where(entry < count, chosen.to(tl.int32), complete)
        n = block * BLOCK + lane % BLOCK
        visible = (entry <= count) & (n <= position) & (n < max_length)
        at = group * max_length * DIM + n[:, None].to(tl.int64) * DIM + d
        k = tl.load(keys_ptr + at, mask=visible[:, None], other=0.0)
        v = tl.load(values_ptr + at, mask=visible[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, _LOW)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - higher)
        p = tl.where(visible[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = higher
    place = (group * HEADS + row) * SPLITS + split
    real = row < HEADS
    tl.store(partial_ptr + place[:, None] * DIM + d, out, mask=real[:, None])
    tl.store(stats_ptr + place, best, mask=real)
    tl.store(stats_ptr + stats_stride + place, total, mask=real)


@triton.jit
def _combine_kernel(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, row_ptr: tl.tensor, out_ptr: tl.tensor,
    stats_stride: tl.tensor, row_stride: tl.tensor, NUM_Q: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DIM)
    place = (batch * NUM_Q + head) * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(stats_ptr + place)
    total = tl.load(stats_ptr + stats_stride + place)
    weight = tl.exp2(best - tl.max(best, axis=0))
    part = tl.load(partial_ptr + place[:, None] * DIM + d[None, :])
    out = tl.sum(part * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    gate = tl.load(row_ptr + batch * row_stride + (2 * head + 1) * DIM + d)
    opened = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32)
    out = out.to(gate.dtype).to(tl.float32) * opened
    tl.store(out_ptr + (batch * NUM_Q + head) * DIM + d, out)


@triton.jit
def _chunk_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, mask_ptr: tl.tensor,
    out_ptr: tl.tensor, scale: tl.tensor, begin: tl.tensor, num_steps: tl.tensor,
    num_blocks: tl.tensor, max_length: tl.tensor, q_stride: tl.tensor, NUM_KV: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    s = first + tl.arange(0, ROWS)
    real = s < num_steps
    position = begin + s
    d = tl.arange(0, DIM)[None, :]
    at_q = batch * q_stride + (s[:, None].to(tl.int64) * NUM_KV * HEADS + head) * DIM + d
    q = tl.load(q_ptr + at_q, mask=real[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    group = batch * NUM_KV + head // HEADS
    opening = (position + 1) // BLOCK * BLOCK
    mask_row = mask_ptr + (batch * num_steps + s[:, None]).to(tl.int64) * num_blocks
    best = tl.full((ROWS,), _LOW, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, begin + tl.minimum(first + ROWS, num_steps), TILE):
        n = start + tl.arange(0, TILE)
        block = n[None, :] // BLOCK
        chosen = tl.load(mask_row + block, mask=real[:, None] & (block < num_blocks), other=0)
        visible = (chosen != 0) | (n[None, :] >= opening[:, None])
        visible = visible & (n[None, :] <= position[:, None]) & real[:, None]
        at = group * max_length * DIM + n[:, None].to(tl.int64) * DIM + d
        there = n[:, None] < max_length
        k = tl.load(keys_ptr + at, mask=there, other=0.0)
        v = tl.load(values_ptr + at, mask=there, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible, scores, _LOW)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - higher)
        p = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = higher
    out = out / tl.where(real, total, 1.0)[:, None]
    at_out = ((batch * num_steps + s[:, None]) * NUM_KV * HEADS + head) * DIM + d
    tl.store(out_ptr + at_out, out, mask=real[:, None])


def launch_attend_step(
    q_BSND: Tensor, row_BSW: Tensor, cache: KeyValues, position: Tensor, block: int,
    selected_BK: Tensor | None,
) -> Tensor:  # fmt: skip
    """[B, S, N * D]: `attend_selected` and `gated` of one token, in two kernels.

    position int []: tokens in the cache before this one, not advanced. selected_BK: blocks by
    falling score, see `indexer.select_few`; None attends to all. Contiguous, D a power of two.
    """
    batch, steps, num_heads, dim = q_BSND.shape
    assert steps == 1 and TILE % block == 0, f"{steps} tokens, blocks of {block}"
    heads = num_heads // cache.num_heads
    device = q_BSND.device
    partial = torch.empty(batch * num_heads, SPLITS, dim, dtype=torch.float32, device=device)
    stats = torch.empty(2, batch * num_heads, SPLITS, dtype=torch.float32, device=device)
    out = q_BSND.new_empty(batch, 1, num_heads * dim)
    budget = ALL if selected_BK is None else selected_BK.shape[1]
    _one_kernel[(SPLITS, cache.num_heads, batch)](
        q_BSND, *cache, selected_BK, position, partial, stats, dim**-0.5 * _LOG2_E,
        cache.keys.shape[2], budget, stats.stride(0), NUM_KV=cache.num_heads, HEADS=heads,
        ROWS=max(_MIN_DOT_ROWS, triton.next_power_of_2(heads)), DIM=dim, BLOCK=block, TILE=TILE,
        SPLITS=SPLITS, UPCAST=device.type == "cpu", num_warps=4,
    )  # fmt: skip
    _combine_kernel[(num_heads, batch)](
        partial, stats, row_BSW, out, stats.stride(0), row_BSW.stride(0), NUM_Q=num_heads,
        DIM=dim, SPLITS=SPLITS, num_warps=4,
    )  # fmt: skip
    return out


def launch_attend_chunk(
    q_BSND: Tensor, cache: KeyValues, begin: int, block: int, mask_BSP: Tensor
) -> Tensor:
    """Triton form of `attend_selected` under a mask; q may be some tokens of more."""
    batch, steps, num_heads, dim = q_BSND.shape
    out = torch.empty(q_BSND.shape, dtype=q_BSND.dtype, device=q_BSND.device)
    _chunk_kernel[(triton.cdiv(steps, QUERY_TILE), num_heads, batch)](
        q_BSND, *cache, mask_BSP.contiguous().view(torch.uint8), out, dim**-0.5 * _LOG2_E, begin,
        steps, mask_BSP.shape[2], cache.keys.shape[2], q_BSND.stride(0), NUM_KV=cache.num_heads,
        HEADS=num_heads // cache.num_heads, DIM=dim, BLOCK=block, TILE=TILE, ROWS=QUERY_TILE,
        UPCAST=q_BSND.device.type == "cpu", num_warps=8,
    )  # fmt: skip
    return out
