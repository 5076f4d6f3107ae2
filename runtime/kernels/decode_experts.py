"""Experts of a few tokens: two matrix-vector passes bound by the bytes of the weights.

Both passes keep one fp32 accumulator per lane of a [BLOCK_N, BLOCK_K] tile and reduce it once at
the end, so that the weights stream through independent wide loads. The first pass puts a token's
experts in ascending id; the second adds them in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.activations import Activation
from residency.runtime.kernels.formats import ExpertShape


class Activated(NamedTuple):
    """Per token, its experts in ascending id; an expert whose row is -1 adds nothing."""

    act: Tensor  # x's dtype [T, K, I]
    row: Tensor  # int32 [T, K]
    weight: Tensor  # fp32 [T, K]


class DecodeConfig(NamedTuple):
    """Tile of one program; block_k * 2 / num_warps / 32 bytes per thread and matrix row."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


GATE_UP_CONFIGS = [
    DecodeConfig(4, 256, 2, 3),
    DecodeConfig(4, 1024, 4, 1),
    DecodeConfig(2, 1024, 4, 1),
    DecodeConfig(4, 512, 4, 1),
    DecodeConfig(2, 512, 2, 1),
    DecodeConfig(1, 1024, 4, 1),
    DecodeConfig(4, 256, 1, 1),
    DecodeConfig(8, 512, 4, 3),
]
DOWN_CONFIGS = [
    DecodeConfig(4, 1024, 4, 1),
    DecodeConfig(2, 1024, 4, 1),
    DecodeConfig(1, 1024, 4, 1),
    DecodeConfig(4, 256, 2, 1),
    DecodeConfig(4, 256, 1, 1),
    DecodeConfig(8, 128, 2, 1),
    DecodeConfig(4, 256, 4, 3),
    DecodeConfig(8, 256, 4, 3),
]


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
        matrix = shape.gate_up(rows[row[token, rank]]).float()
        gate, up = (matrix @ x[token].float()).chunk(2)
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
        matrix = shape.down(rows[row[token, rank]]).float()
        total[token] += weight[token, rank] * (matrix @ act[token, rank].float())
    if extra is not None:
        total += extra
    if residual is not None:
        total += residual
    return total.to(act.dtype)


@triton.jit
def _gate_up_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, row_of_ptr: tl.tensor,
    rows_ptr: tl.tensor, act_ptr: tl.tensor, row_ptr: tl.tensor, weight_ptr: tl.tensor,
    offset_bytes: tl.tensor, row_bytes: tl.tensor, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, LOAD: tl.constexpr, ACTIVATE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
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
    kept = (n < tl.where(row >= 0, WIDTH, 0))[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        k = (begin + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + token * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        mask = kept & (k < HIDDEN)
        gate += (
            LOAD(expert, offset_bytes, n[:, None], k, 2 * WIDTH, HIDDEN, mask).to(tl.float32) * x
        )
        up += (
            LOAD(expert, offset_bytes, n[:, None] + WIDTH, k, 2 * WIDTH, HIDDEN, mask).to(
                tl.float32
            )
            * x
        )
    result = ACTIVATE(tl.sum(gate, axis=1), tl.sum(up, axis=1))
    tl.store(act_ptr + place * WIDTH + n, result, mask=n < WIDTH)
    if tl.program_id(0) == 0:
        tl.store(row_ptr + place, row)
        tl.store(weight_ptr + place, tl.load(weights_ptr + pair).to(tl.float32))


@triton.jit
def _down_kernel(
    act_ptr: tl.tensor, row_ptr: tl.tensor, weight_ptr: tl.tensor, rows_ptr: tl.tensor,
    residual_ptr: tl.tensor, extra_ptr: tl.tensor, y_ptr: tl.tensor, offset_bytes: tl.tensor,
    row_bytes: tl.tensor, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    LOAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    extra = tl.zeros((BLOCK_N,), tl.float32)
    if extra_ptr is not None:  # asked for first: it may come across the link
        extra = tl.load(extra_ptr + token * HIDDEN + n, mask=n < HIDDEN, other=0.0)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for rank in tl.static_range(TOP_K):
        place = token * TOP_K + rank
        row = tl.load(row_ptr + place)
        weight = tl.load(weight_ptr + place)
        expert = rows_ptr + tl.maximum(row, 0).to(tl.int64) * row_bytes
        kept = (n < tl.where(row >= 0, HIDDEN, 0))[:, None]
        for begin in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            k = (begin + tl.arange(0, BLOCK_K))[None, :]
            act = tl.load(act_ptr + place * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
            tile = LOAD(expert, offset_bytes, n[:, None], k, HIDDEN, WIDTH, kept & (k < WIDTH))
            total += tile.to(tl.float32) * (act * weight)
    y = tl.sum(total, axis=1) + extra
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
        shape.gate_up_offset_bytes, shape.row_bytes,
        HIDDEN=shape.hidden, WIDTH=shape.width, TOP_K=top_k,
        LOAD=shape.format.load, ACTIVATE=activation.kernel,
        BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, STAGES=cfg.num_stages,
        num_warps=cfg.num_warps,
    )  # fmt: skip
    return out


def launch_down(
    activated: Activated,
    rows: Tensor,
    shape: ExpertShape,
    residual: Tensor | None = None,
    extra: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Triton form of `down`; all tensors contiguous, extra on the device or in pinned memory."""
    num_tokens, top_k, _ = activated.act.shape
    cfg = config or choose_down(shape)
    y = activated.act.new_empty(num_tokens, shape.hidden)
    grid = (triton.cdiv(shape.hidden, cfg.block_n), num_tokens)
    _down_kernel[grid](
        *activated, rows, residual, extra, y,
        shape.down_offset_bytes, shape.row_bytes,
        HIDDEN=shape.hidden, WIDTH=shape.width, TOP_K=top_k, LOAD=shape.format.load,
        BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, STAGES=cfg.num_stages,
        num_warps=cfg.num_warps,
    )  # fmt: skip
    return y


def choose_gate_up(shape: ExpertShape) -> DecodeConfig:
    """By the expert's shape alone, so that a token's bits do not depend on its company."""
    return GATE_UP_CONFIGS[0]


def choose_down(shape: ExpertShape) -> DecodeConfig:
    """As `choose_gate_up`."""
    return DOWN_CONFIGS[0]
