"""Experts of a chunk: grouped matrix products over pairs sorted by expert.

A chunk is worked off in groups of experts as their rows arrive, in any order. An expert's places
are cut into tiles from its own first place, and tile shapes come from the whole chunk, so the
bits of a result do not depend on the grouping. Results stay in sorted order and are unweighted;
`combine` alone weighs them and adds a token's experts in ascending id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.activations import Activation
from residency.runtime.kernels.expert_tiles import ChunkTiles, TileShape, choose_tiles
from residency.runtime.kernels.formats import ExpertShape
from residency.runtime.kernels.grouping import Grouping, launch_tiles_of


def run_group(
    x: Tensor,
    grouping: Grouping,
    experts: Tensor,
    row_of: Tensor,
    rows: Tensor,
    shape: ExpertShape,
    activation: Activation,
    act: Tensor,
    y: Tensor,
) -> None:
    """Fills act and y at the places of the listed experts and nowhere else.

    x [T, H]; experts int32 [G], distinct, -1 where padded, each with a row; row_of int32 [E];
    rows uint8 [num_rows, row_bytes]; act [P, I] and y [P, H] in x's dtype, in sorted order.
    Synchronises with the host.
    """
    top_k = grouping.position.shape[1]
    offsets = grouping.offsets.tolist()
    for expert in experts.tolist():
        places = slice(offsets[expert], offsets[expert + 1])
        if expert < 0 or places.start == places.stop:
            continue
        row = rows[row_of[expert]]
        tokens = grouping.order[places] // top_k
        product = x[tokens].float() @ shape.gate_up(row).T
        act[places] = activation.definition(*shape.gate_and_up(product, row)).to(x.dtype)
        y[places] = shape.with_bias(act[places].float() @ shape.down(row).T, row).to(x.dtype)


def combine(
    y: Tensor, grouping: Grouping, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """[T, H]: y [P, H] weighed with weights [T, K], ascending expert id, one rounding.

    Adds residual [T, H] where given.
    """
    weight = weights.flatten().float()[grouping.order]
    num_tokens, top_k = grouping.position.shape
    total = y.new_zeros(num_tokens, y.shape[1], dtype=torch.float32)
    for rank in range(top_k):
        place = grouping.position[:, rank].long()
        total += weight[place, None] * y[place].float()
    if residual is not None:
        total += residual
    return total.to(y.dtype)


@triton.jit
def _tile_at(
    bound: tl.tensor, N: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(tile, column block): SWIZZLE tiles share a sweep over the columns, to share weights."""
    columns = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (SWIZZLE * columns)
    height = tl.minimum(bound - band * SWIZZLE, SWIZZLE)
    inner = tl.program_id(0) - band * SWIZZLE * columns
    return band * SWIZZLE + inner % height, inner // height


@triton.jit
def _product(
    a_ptrs: tl.tensor, expert: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, LOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N]: rows at a_ptrs [BLOCK_M, 1] times weight rows n [BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            a = tl.load(a_ptrs + k[None, :])
        else:
            a = tl.load(a_ptrs + k[None, :], mask=k[None, :] < K, other=0.0)
        b = LOAD(expert, offset_bytes, n, begin, N, K, None, BLOCK_K)
        total = tl.dot(a, tl.trans(b.to(a.dtype)), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["bound"])
def _gate_up_kernel(
    x_ptr: tl.tensor, order_ptr: tl.tensor, offsets_ptr: tl.tensor, row_of_ptr: tl.tensor,
    rows_ptr: tl.tensor, tile_expert_ptr: tl.tensor, tile_start_ptr: tl.tensor, act_ptr: tl.tensor,
    offset_bytes: tl.tensor, bias_bytes: tl.tensor, row_bytes: tl.tensor, bound: tl.tensor,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, LOAD: tl.constexpr,
    OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, GATE_STEP: tl.constexpr, UP_OFFSET: tl.constexpr,
    ACTIVATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLE: tl.constexpr,
) -> None:  # fmt: skip
    tile, column = _tile_at(bound, 2 * WIDTH, BLOCK_N, SWIZZLE)
    expert_id = tl.load(tile_expert_ptr + tile)
    if expert_id < 0:
        return
    end = tl.load(offsets_ptr + expert_id + 1)
    place = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    expert = rows_ptr + tl.load(row_of_ptr + expert_id).to(tl.int64) * row_bytes
    token = tl.load(order_ptr + tl.minimum(place, end - 1)).to(tl.int64) // TOP_K

    # Gate and up rows alternate in the tile: one product, and both halves meet in one thread.
    HALF: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    if GATE_STEP == 2:
        n = (column * BLOCK_N + lane) % (2 * WIDTH)  # unlike a minimum it keeps runs of rows
    else:
        n = tl.minimum(column * HALF + lane // 2, WIDTH - 1) + (lane % 2) * UP_OFFSET
    total = _product(
        (x_ptr + token * HIDDEN)[:, None], expert, offset_bytes, n, 2 * WIDTH, HIDDEN,
        LOAD, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(total, (BLOCK_M, HALF, 2)))
    gate *= OUTER(expert, offset_bytes, 0, 2 * WIDTH, HIDDEN)
    up *= OUTER(expert, offset_bytes, 1, 2 * WIDTH, HIDDEN)
    i = column * HALF + tl.arange(0, HALF)
    if HAS_BIAS:
        bias_ptr = (expert + bias_bytes).to(tl.pointer_type(act_ptr.dtype.element_ty))
        bias_ptrs = bias_ptr + tl.minimum(i, WIDTH - 1) * GATE_STEP
        gate += tl.load(bias_ptrs)[None, :].to(tl.float32)
        up += tl.load(bias_ptrs + UP_OFFSET)[None, :].to(tl.float32)
    target = act_ptr + place.to(tl.int64)[:, None] * WIDTH + i[None, :]
    tl.store(
        target, ACTIVATE(gate, up, ALPHA, LIMIT), mask=(place < end)[:, None] & (i < WIDTH)[None, :]
    )


@triton.jit(do_not_specialize=["bound"])
def _down_kernel(
    act_ptr: tl.tensor, offsets_ptr: tl.tensor, row_of_ptr: tl.tensor, rows_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor, tile_start_ptr: tl.tensor, y_ptr: tl.tensor,
    offset_bytes: tl.tensor, bias_bytes: tl.tensor, row_bytes: tl.tensor, bound: tl.tensor,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, LOAD: tl.constexpr, OUTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
) -> None:  # fmt: skip
    tile, column = _tile_at(bound, HIDDEN, BLOCK_N, SWIZZLE)
    expert_id = tl.load(tile_expert_ptr + tile)
    if expert_id < 0:
        return
    end = tl.load(offsets_ptr + expert_id + 1)
    place = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    expert = rows_ptr + tl.load(row_of_ptr + expert_id).to(tl.int64) * row_bytes
    source = act_ptr + tl.minimum(place, end - 1).to(tl.int64) * WIDTH
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n % HIDDEN
    total = _product(
        source[:, None], expert, offset_bytes, inside, HIDDEN, WIDTH, LOAD, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    total *= OUTER(expert, offset_bytes, 0, HIDDEN, WIDTH)
    if HAS_BIAS:
        bias_ptr = (expert + bias_bytes).to(tl.pointer_type(y_ptr.dtype.element_ty))
        total += tl.load(bias_ptr + inside)[None, :].to(tl.float32)
    target = y_ptr + place.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(target, total, mask=(place < end)[:, None] & (n < HIDDEN)[None, :])


@triton.jit
def _combine_kernel(
    y_ptr: tl.tensor, order_ptr: tl.tensor, position_ptr: tl.tensor, weights_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_ptr: tl.tensor, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        place = tl.load(position_ptr + token * TOP_K + rank).to(tl.int64)
        weight = tl.load(weights_ptr + tl.load(order_ptr + place)).to(tl.float32)
        y = tl.load(y_ptr + place * HIDDEN + h, mask=h < HIDDEN, other=0.0)
        total += weight * y.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + token * HIDDEN + h, mask=h < HIDDEN, other=0.0)
        total += residual.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + h, total, mask=h < HIDDEN)


def launch_run_group(
    x: Tensor,
    grouping: Grouping,
    experts: Tensor,
    row_of: Tensor,
    rows: Tensor,
    shape: ExpertShape,
    activation: Activation,
    act: Tensor,
    y: Tensor,
    config: ChunkTiles | None = None,
) -> None:
    """Triton form of `run_group`, three launches, no host sync."""
    cfg = config or choose_tiles(grouping.order.numel(), row_of.numel(), shape, x.dtype)
    tiles = launch_tiles_of(grouping, experts, cfg.gate_up.block_m)
    bound = tiles.expert.numel()
    _gate_up_kernel[(bound * triton.cdiv(2 * shape.width, cfg.gate_up.block_n),)](
        x, grouping.order, grouping.offsets, row_of, rows, *tiles, act,
        shape.gate_up_offset_bytes, shape.bias_bytes[0], shape.row_bytes, bound,
        HIDDEN=shape.hidden, WIDTH=shape.width, TOP_K=grouping.position.shape[1],
        LOAD=shape.loads.load, OUTER=shape.loads.outer, HAS_BIAS=shape.has_bias,
        GATE_STEP=shape.gate_step, UP_OFFSET=shape.up_offset,
        ACTIVATE=activation.kernel, ALPHA=activation.alpha, LIMIT=activation.limit,
        **_launch_options(cfg.gate_up),
    )  # fmt: skip
    _down_kernel[(bound * triton.cdiv(shape.hidden, cfg.down.block_n),)](
        act, grouping.offsets, row_of, rows, *tiles, y,
        shape.down_offset_bytes, shape.bias_bytes[1], shape.row_bytes, bound,
        HIDDEN=shape.hidden, WIDTH=shape.width,
        LOAD=shape.loads.load, OUTER=shape.loads.outer, HAS_BIAS=shape.has_bias,
        **_launch_options(cfg.down),
    )  # fmt: skip


def launch_combine(
    y: Tensor, grouping: Grouping, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Triton form of `combine`; all tensors contiguous."""
    num_tokens, top_k = grouping.position.shape
    hidden = y.shape[1]
    out = y.new_empty(num_tokens, hidden)
    _combine_kernel[(triton.cdiv(hidden, 1024), num_tokens)](
        y, grouping.order, grouping.position, weights, residual, out,
        HIDDEN=hidden, TOP_K=top_k, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


def _launch_options(tile: TileShape) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SWIZZLE": 8,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
