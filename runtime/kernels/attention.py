"""Attention of one new token per sequence over a static cache, in one kernel.

The kernel also norms, turns and stores the new token's heads, as `rotary` does for a chunk. It
cuts the context into as many splits whatever its length, so that the grid is fixed. The
split that owns the new token writes it to the cache and takes it from registers; the split of a
head that arrives last combines them all. Every program arrives, empty ones at once, because a
position is advanced when the last head that reads it is done and must have been read by all.

Sequences may be of one length, one position for all of them, or each of its own.

Further legend: B sequences, W width of qkv, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.dense import launch_options, wait_for_inputs
from residency.runtime.kernels.rotary import (
    HeadNorms,
    KeyValues,
    batch_stride,
    rotate_and_store,
    turn,
)

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16
_SPLITS_PER_LOAD = tl.constexpr(8)


class AttendConfig(NamedTuple):
    """Splits of the context and keys per step of a split; `early` as in DenseConfig."""

    splits: int
    block: int
    num_warps: int
    num_stages: int
    early: bool = False


ATTEND_CONFIGS = [
    AttendConfig(16, 32, 4, 3),
    AttendConfig(32, 32, 4, 2),
    AttendConfig(32, 64, 4, 2),
    AttendConfig(16, 64, 4, 2),
    AttendConfig(32, 16, 4, 3),
    AttendConfig(64, 32, 4, 2),
]


class Scratch(NamedTuple):
    """Working memory of decode attention, shared by launches that follow one another."""

    partial: Tensor  # fp32 [B * KV heads, splits, query heads of a KV head, D]
    stats: Tensor  # fp32 [2, B * KV heads, splits, query heads of a KV head]: maximum, sum
    arrivals: Tensor  # int32 [B * KV heads + B], zero before and after each launch

    @classmethod
    def empty(
        cls, batch: int, num_heads: int, cache: KeyValues, config: AttendConfig | None = None
    ) -> Scratch:
        groups, per_group = batch * cache.num_heads, num_heads // cache.num_heads
        splits = (config or ATTEND_CONFIGS[0]).splits
        device = cache.keys.device
        return cls(
            torch.empty(groups, splits, per_group, cache.dim, device=device),
            torch.empty(2, groups, splits, per_group, device=device),
            torch.zeros(groups + batch, dtype=torch.int32, device=device),
        )


def attend_one(
    qkv_BW: Tensor,
    norms: HeadNorms,
    cos_BD: Tensor,
    sin_BD: Tensor,
    cache: KeyValues,
    position: Tensor,
    scratch: Scratch | None = None,
) -> Tensor:
    """Attention [B, query heads * D] of one new token per sequence; advances position by one.

    cos and sin [B or 1, D]; position int [] or [B]: the tokens in the cache before this one.
    """
    batch = qkv_BW.shape[0]
    assert scratch is None or _suffices(scratch, batch, cache), "scratch is too small"
    positions = position.expand(batch).tolist()
    attended = []
    for row, begin in enumerate(positions):
        own = KeyValues(*(kept[row : row + 1] for kept in cache))
        cos, sin = (t[min(row, len(t) - 1)][None, None] for t in (cos_BD, sin_BD))
        at = position.new_tensor(begin)
        q = rotate_and_store(qkv_BW[row : row + 1, None], norms, cos, sin, own, at)
        q = q.view(cache.num_heads, -1, cache.dim).float()
        scores = q @ own.keys[0, :, : begin + 1].float().mT * cache.dim**-0.5
        out = scores.softmax(-1) @ own.values[0, :, : begin + 1].float()
        attended.append(out.flatten())
    position.add_(1)
    return torch.stack(attended).to(qkv_BW.dtype)


def _suffices(scratch: Scratch, batch: int, cache: KeyValues) -> bool:
    return scratch.arrivals.numel() >= batch * (cache.num_heads + 1)


@triton.jit
def _attend_kernel(
    qkv_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, position_ptr: tl.tensor,
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, arrivals_ptr: tl.tensor, out_ptr: tl.tensor,
    eps: tl.tensor, scale: tl.tensor, max_length: tl.tensor, cos_stride: tl.tensor,
    position_stride: tl.tensor, readers: tl.tensor, stats_stride: tl.tensor,
    NUM_KV: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    group = batch * NUM_KV + kv_head
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, DIM)[None, :]
    partner_d = (d + DIM // 2) % DIM
    q_weight = tl.load(q_weight_ptr + d)
    k_weight = tl.load(k_weight_ptr + d)
    q_partner_weight = tl.load(q_weight_ptr + partner_d)
    k_partner_weight = tl.load(k_weight_ptr + partner_d)
    wait_for_inputs(EARLY)

    position = tl.load(position_ptr + batch * position_stride).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(position + 1, SPLITS), BLOCK) * BLOCK
    begin = split * per_split
    if begin <= position:
        token = qkv_ptr + batch * (NUM_KV * (HEADS + 2) * DIM)
        cos = tl.load(cos_ptr + batch * cos_stride + d)
        sin = tl.load(sin_ptr + batch * cos_stride + d)
        q_row = token + (kv_head * HEADS + row) * DIM
        q = tl.load(q_row + d, mask=row < HEADS, other=0.0)
        q_partner = tl.load(q_row + partner_d, mask=row < HEADS, other=0.0)
        k_row = token + (NUM_KV * HEADS + kv_head) * DIM
        k_new = tl.load(k_row + d)
        k_partner = tl.load(k_row + partner_d)
        v_new = tl.load(k_row + NUM_KV * DIM + d)
        q = turn(q, q_partner, q_weight, q_partner_weight, cos, sin, d, eps, DIM)
        k_new = turn(k_new, k_partner, k_weight, k_partner_weight, cos, sin, d, eps, DIM)

        cached = group * max_length * DIM
        owner = position < begin + per_split
        written = d < tl.where(owner & (position < max_length), DIM, 0)
        at = cached + position.to(tl.int64) * DIM + d
        tl.store(keys_ptr + at, k_new, mask=written)
        tl.store(values_ptr + at, v_new, mask=written)

        # The running softmax starts with the new token where it is this split's.
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
        best = tl.where(owner, score, float("-inf"))
        total = tl.where(owner, 1.0, 0.0) + tl.zeros((ROWS,), tl.float32)
        out = tl.where(owner, v_new.to(tl.float32), 0.0) + tl.zeros((ROWS, DIM), tl.float32)
        if UPCAST:
            q = q.to(tl.float32)
        for start in tl.range(
            begin, tl.minimum(begin + per_split, position), BLOCK, num_stages=STAGES
        ):
            n = start + tl.arange(0, BLOCK)
            inside = n < position
            tile = cached + n[:, None].to(tl.int64) * DIM + d
            k = tl.load(keys_ptr + tile, mask=inside[:, None], other=0.0)
            v = tl.load(values_ptr + tile, mask=inside[:, None], other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            shrink = tl.exp2(best - higher)
            p = tl.exp2(scores - higher[:, None])
            total = total * shrink + tl.sum(p, axis=1)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            best = higher
        place = (group * SPLITS + split) * HEADS + tl.arange(0, ROWS)
        real = tl.arange(0, ROWS) < HEADS
        tl.store(partial_ptr + place[:, None] * DIM + d, out, mask=real[:, None])
        tl.store(stats_ptr + place, best, mask=real)
        tl.store(stats_ptr + stats_stride + place, total, mask=real)

    # All threads' results are written before the program arrives; who comes last sees them all.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + group, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(arrivals_ptr + group, 0)
        _combine(
            partial_ptr, stats_ptr, out_ptr, group, tl.cdiv(position + 1, per_split),
            stats_stride, HEADS, HEADS_PAD, DIM, SPLITS,
        )  # fmt: skip
        counter = arrivals_ptr + NUM_KV * tl.num_programs(2) + batch * position_stride
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if done == readers - 1:
            tl.store(counter, 0)
            tl.store(position_ptr + batch * position_stride, position + 1)


@triton.jit
def _combine(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, out_ptr: tl.tensor, group: tl.tensor,
    num_active: tl.tensor, stats_stride: tl.tensor, HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Adds the active splits of one group of heads, a few of them at a time."""
    head = tl.arange(0, HEADS_PAD)
    every = tl.arange(0, SPLITS)[:, None]
    at = stats_ptr + (group * SPLITS + every) * HEADS + head[None, :]
    there = (every < num_active) & (head[None, :] < HEADS)
    best = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(at + stats_stride, mask=there, other=0.0, cache_modifier=".cg")
    highest = tl.max(best, axis=0)
    highest = tl.where(head < HEADS, highest, 0.0)
    total = tl.sum(tl.exp2(best - highest[None, :]) * total, axis=0)

    d = tl.arange(0, DIM)[None, None, :]
    out = tl.zeros((HEADS_PAD, DIM), tl.float32)
    for start in tl.static_range(0, SPLITS, _SPLITS_PER_LOAD):
        split = (start + tl.arange(0, _SPLITS_PER_LOAD))[:, None]
        place = (group * SPLITS + split) * HEADS + head[None, :]
        real = (split < num_active) & (head[None, :] < HEADS)
        stat = tl.load(stats_ptr + place, mask=real, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + place[:, :, None] * DIM + d,
            mask=real[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        out += tl.sum(tl.exp2(stat - highest[None, :])[:, :, None] * part, axis=0)
    total = tl.where(head < HEADS, total, 1.0)
    at_out = (group * HEADS + head[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out_ptr + at_out, out / total[:, None], mask=(head < HEADS)[:, None])


def launch_attend_one(
    qkv_BW: Tensor,
    norms: HeadNorms,
    cos_BD: Tensor,
    sin_BD: Tensor,
    cache: KeyValues,
    position: Tensor,
    scratch: Scratch | None = None,
    config: AttendConfig | None = None,
) -> Tensor:
    """Triton form of `attend_one`; D a power of two, all tensors contiguous.

    scratch: from `Scratch.empty` of this batch or a larger one, and of the same config.
    """
    batch, width = qkv_BW.shape
    assert position.numel() in (1, batch), f"{position.numel()} positions, {batch} sequences"
    num_kv, dim = cache.num_heads, cache.dim
    num_q = width // dim - 2 * num_kv
    heads = num_q // num_kv
    heads_pad = triton.next_power_of_2(heads)
    cfg = config or ATTEND_CONFIGS[0]
    work = scratch or Scratch.empty(batch, num_q, cache, cfg)
    out = qkv_BW.new_empty(batch, num_q * dim)
    own = int(position.numel() > 1)  # else all heads read one position
    _attend_kernel[(cfg.splits, num_kv, batch)](
        qkv_BW, norms.q_D, norms.k_D, cos_BD, sin_BD, *cache, position, *work, out,
        norms.eps, dim**-0.5 * _LOG2_E, cache.keys.shape[2], batch_stride(cos_BD),
        own, num_kv if own else num_kv * batch, work.stats.stride(0),
        NUM_KV=num_kv, HEADS=heads, HEADS_PAD=heads_pad,
        ROWS=max(_MIN_DOT_ROWS, heads_pad), DIM=dim,
        SPLITS=cfg.splits, BLOCK=cfg.block, STAGES=cfg.num_stages,
        UPCAST=qkv_BW.device.type == "cpu", EARLY=cfg.early,
        num_warps=cfg.num_warps, **launch_options(cfg.early),
    )  # fmt: skip
    return out
