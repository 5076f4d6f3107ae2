"""Experts of a few tokens: two matrix-vector passes bound by the bytes of the weights.

Both passes keep one fp32 accumulator for each FOLD neighbours of a [BLOCK_N, BLOCK_K] tile and
reduce them once at the end, so that the weights stream through independent wide loads. The first
pass puts a token's experts in ascending id; the second adds them in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.activations import Activation
from residency.runtime.kernels.expert_tiles import DecodeConfig, choose_down, choose_gate_up
from residency.runtime.kernels.formats import ExpertShape


class Activated(NamedTuple):
    """Per token, its experts in ascending id; an expert whose row is -1 adds nothing."""

    act: Tensor  # x's dtype [T, K, I]
    row: Tensor  # int32 [T, K]
    weight: Tensor  # fp32 [T, K]


def gate_up(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    row_of: Tensor,
    rows: Tensor,
    shape: ExpertShape,
    activation: Activation,
) -> Activated:
    """Activations of each token's experts.

    x [T, H]; ids int [T, K], distinct within a token; weights [T, K]; row_of int32 [E];
    rows uint8 [num_rows, row_bytes].
    """
    order = ids.argsort(dim=1, stable=True)
    row = row_of[ids.gather(1, order).long()]
    act = x.new_zeros(*ids.shape, shape.width)
    for token, rank in row.ge(0).nonzero().tolist():
        expert = rows[row[token, rank]]
        gate, up = shape.gate_and_up(shape.gate_up(expert) @ x[token].float(), expert)
        act[token, rank] = activation.definition(gate, up).to(x.dtype)
    return Activated(act, row, weights.gather(1, order).float())


def down(
    activated: Activated,
    rows: Tensor,
    shape: ExpertShape,
    residual: Tensor | None = None,
    extra: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the experts' results [T, H], one rounding; residual [T, H] is added.

    extra: fp32 [T, H], what was computed elsewhere, added as well.
    """
    act, row, weight = activated
    total = act.new_zeros(act.shape[0], shape.hidden, dtype=torch.float32)
    for token, rank in row.ge(0).nonzero().tolist():
        expert = rows[row[token, rank]]
        y = shape.with_bias(shape.down(expert) @ act[token, rank].float(), expert)
        total[token] += weight[token, rank] * y
    if extra is not None:
        total += extra
    if residual is not None:
        total += residual
    return total.to(act.dtype)


@triton.jit
def _add_products(total: tl.tensor, tile: tl.tensor, x: tl.tensor, FOLD: tl.constexpr) -> tl.tensor:
    """total [N, K / FOLD] + the products of tile [N, K] and x [1, K], FOLD neighbours in one."""
    products = tile.to(tl.float32) * x
    if FOLD > 1:
        shape: tl.constexpr = (total.shape[0], total.shape[1], FOLD)
        products = tl.sum(tl.reshape(products, shape), axis=2)
    return total + products


@triton.jit
def _gate_up_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, row_of_ptr: tl.tensor,
    rows_ptr: tl.tensor, act_ptr: tl.tensor, row_ptr: tl.tensor, weight_ptr: tl.tensor,
    offset_bytes: tl.tensor, bias_bytes: tl.tensor, row_bytes: tl.tensor, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, LOAD: tl.constexpr, OUTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE_STEP: tl.constexpr, UP_OFFSET: tl.constexpr,
    ACTIVATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(1)
    token = pair // TOP_K
    mine = tl.load(ids_ptr + pair)
    row = tl.load(row_of_ptr + mine)
    rank = 0
    for j in tl.static_range(TOP_K):
        rank += (tl.load(ids_ptr + token * TOP_K + j) < mine).to(tl.int32)
    place = token * TOP_K + rank

    expert = rows_ptr + tl.maximum(row, 0).to(tl.int64) * row_bytes
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = n < tl.where(row >= 0, WIDTH, 0)
    gate_n = n * GATE_STEP
    up_n = gate_n + UP_OFFSET
    gate = tl.zeros((BLOCK_N, BLOCK_K // FOLD), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // FOLD), tl.float32)
    for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        k = (begin + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + token * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        tile = LOAD(expert, offset_bytes, gate_n, begin, 2 * WIDTH, HIDDEN, kept, BLOCK_K)
        gate = _add_products(gate, tile, x, FOLD)
        tile = LOAD(expert, offset_bytes, up_n, begin, 2 * WIDTH, HIDDEN, kept, BLOCK_K)
        up = _add_products(up, tile, x, FOLD)
    gate_N = tl.sum(gate, axis=1) * OUTER(expert, offset_bytes, 0, 2 * WIDTH, HIDDEN)
    up_N = tl.sum(up, axis=1) * OUTER(expert, offset_bytes, 1, 2 * WIDTH, HIDDEN)
    if HAS_BIAS:
        bias_ptr = (expert + bias_bytes).to(tl.pointer_type(act_ptr.dtype.element_ty))
        gate_N += tl.load(bias_ptr + gate_n, mask=kept, other=0.0).to(tl.float32)
        up_N += tl.load(bias_ptr + up_n, mask=kept, other=0.0).to(tl.float32)
    tl.store(act_ptr + place * WIDTH + n, ACTIVATE(gate_N, up_N, ALPHA, LIMIT), mask=n < WIDTH)
    if tl.program_id(0) == 0:
        tl.store(row_ptr + place, row)
        tl.store(weight_ptr + place, tl.load(weights_ptr + pair).to(tl.float32))


@triton.jit
def _down_kernel(
    act_ptr: tl.tensor, row_ptr: tl.tensor, weight_ptr: tl.tensor, rows_ptr: tl.tensor,
    residual_ptr: tl.tensor, extra_ptr: tl.tensor, y_ptr: tl.tensor, offset_bytes: tl.tensor,
    bias_bytes: tl.tensor, row_bytes: tl.tensor, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, LOAD: tl.constexpr, OUTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # What is neither a product nor the residual: biases, and the host's sum, asked for first,
    # since it may come across the link.
    others = tl.zeros((BLOCK_N,), tl.float32)
    if extra_ptr is not None:
        others += tl.load(extra_ptr + token * HIDDEN + n, mask=n < HIDDEN, other=0.0)
    total = tl.zeros((BLOCK_N, BLOCK_K // FOLD), tl.float32)
    for rank in tl.static_range(TOP_K):
        place = token * TOP_K + rank
        row = tl.load(row_ptr + place)
        weight = tl.load(weight_ptr + place)
        expert = rows_ptr + tl.maximum(row, 0).to(tl.int64) * row_bytes
        kept = n < tl.where(row >= 0, HIDDEN, 0)
        # Both halves of down have one outer factor, so it can join the expert's weight.
        factor = weight * OUTER(expert, offset_bytes, 0, HIDDEN, WIDTH)
        for begin in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            k = (begin + tl.arange(0, BLOCK_K))[None, :]
            act = tl.load(act_ptr + place * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
            tile = LOAD(expert, offset_bytes, n, begin, HIDDEN, WIDTH, kept, BLOCK_K)
            total = _add_products(total, tile, act * factor, FOLD)
        if HAS_BIAS:
            bias_ptr = (expert + bias_bytes).to(tl.pointer_type(y_ptr.dtype.element_ty))
            bias = tl.load(bias_ptr + n, mask=kept, other=0.0)
            others += weight * bias.to(tl.float32)
    y = tl.sum(total, axis=1) + others
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * HIDDEN + n, y, mask=n < HIDDEN)


def launch_gate_up(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    row_of: Tensor,
    rows: Tensor,
    shape: ExpertShape,
    activation: Activation,
    config: DecodeConfig | None = None,
) -> Activated:
    """Triton form of `gate_up`; all tensors contiguous."""
    num_tokens, top_k = ids.shape
    cfg = config or choose_gate_up(shape)
    out = Activated(
        x.new_empty(num_tokens, top_k, shape.width),
        torch.empty_like(ids, dtype=torch.int32),
        torch.empty_like(ids, dtype=torch.float32),
    )
    grid = (triton.cdiv(shape.width, cfg.block_n), num_tokens * top_k)
    _gate_up_kernel[grid](
        x, ids, weights, row_of, rows, *out,
        shape.gate_up_offset_bytes, shape.bias_bytes[0], shape.row_bytes,
        HIDDEN=shape.hidden, WIDTH=shape.width, TOP_K=top_k,
        LOAD=shape.loads.load, OUTER=shape.loads.outer, HAS_BIAS=shape.has_bias,
        GATE_STEP=shape.gate_step, UP_OFFSET=shape.up_offset,
        ACTIVATE=activation.kernel, ALPHA=activation.alpha, LIMIT=activation.limit,
        BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, FOLD=cfg.fold, STAGES=cfg.num_stages,
        num_warps=cfg.num_warps,
    )  # fmt: skip
    return out


def launch_down(
    activated: Activated,
    rows: Tensor,
    shape: ExpertShape,
    residual: Tensor | None = None,
    extra: Tensor | None = None,
    *,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Triton form of `down`; all tensors contiguous, extra on the device or in pinned memory."""
    num_tokens, top_k, _ = activated.act.shape
    cfg = config or choose_down(shape)
    y = activated.act.new_empty(num_tokens, shape.hidden)
    grid = (triton.cdiv(shape.hidden, cfg.block_n), num_tokens)
    _down_kernel[grid](
        *activated, rows, residual, extra, y,
        shape.down_offset_bytes, shape.bias_bytes[1], shape.row_bytes,
        HIDDEN=shape.hidden, WIDTH=shape.width, TOP_K=top_k,
        LOAD=shape.loads.load, OUTER=shape.loads.outer, HAS_BIAS=shape.has_bias,
        BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, FOLD=cfg.fold, STAGES=cfg.num_stages,
        num_warps=cfg.num_warps,
    )  # fmt: skip
    return y
