"""Orders a chunk's (token, expert) pairs by expert, and cuts groups of experts into tiles.

Everything stays on the device and has shapes known beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Grouping(NamedTuple):
    """Pairs sorted by expert, stable. Pair `t * K + k` is token t's k-th routed expert."""

    order: Tensor  # int64 [P] the pair at each sorted place
    offsets: Tensor  # int32 [E + 1] expert e owns places offsets[e] to offsets[e + 1]
    position: Tensor  # int32 [T, K] places of a token's pairs, in ascending expert id


class Tiles(NamedTuple):
    """Work of one group: tile i covers block_m places of one expert from start[i]."""

    expert: Tensor  # int32 [bound], -1 past the last tile
    start: Tensor  # int32 [bound]


def group_pairs(ids: Tensor, num_experts: int) -> Grouping:
    """ids int [T, K]: distinct within a token, or num_experts where a token is routed nowhere."""
    ordered, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return Grouping(order, offsets, places.view_as(ids).sort(dim=1).values.int())


def tiles_of(grouping: Grouping, experts: Tensor, block_m: int) -> Tiles:
    """experts int32 [G], distinct, -1 where the list is padded. Synchronises with the host."""
    bound = num_tiles(grouping.order.numel(), experts.numel(), block_m)
    offsets = grouping.offsets.tolist()
    cuts = [
        (expert, start)
        for expert in experts.tolist()
        if expert >= 0
        for start in range(offsets[expert], offsets[expert + 1], block_m)
    ]
    cuts += [(-1, 0)] * (bound - len(cuts))
    return Tiles(*torch.tensor(cuts, dtype=torch.int32, device=experts.device).unbind(1))


def num_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that num_pairs can make when spread over num_experts."""
    return min(num_pairs, num_pairs // block_m + num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    ids_ptr: tl.tensor, order_ptr: tl.tensor, offsets_ptr: tl.tensor, position_ptr: tl.tensor,
    num_pairs: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program an expert: it reads all ids, which lie in the cache, and places its own pairs."""
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + lane
        before += (tl.load(ids_ptr + pair, mask=pair < num_pairs, other=mine) < mine).to(tl.int32)
    first = tl.sum(before)
    tl.store(offsets_ptr + mine, first)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + lane
        own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=mine - 1) == mine
        place = first + tl.cumsum(own.to(tl.int32), 0) - 1
        first += tl.sum(own.to(tl.int32))
        tl.store(order_ptr + place, pair.to(tl.int64), mask=own)
        token = pair // TOP_K
        rank = tl.zeros((BLOCK,), tl.int32)
        for j in tl.static_range(TOP_K):
            rank += (tl.load(ids_ptr + token * TOP_K + j, mask=own, other=mine) < mine).to(tl.int32)
        tl.store(position_ptr + token * TOP_K + rank, place, mask=own)


@triton.jit(do_not_specialize=["num_experts", "bound"])
def _tiles_kernel(
    offsets_ptr: tl.tensor, experts_ptr: tl.tensor, tile_expert_ptr: tl.tensor,
    tile_start_ptr: tl.tensor, num_experts: tl.tensor, bound: tl.tensor, BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, BLOCK_G)
    expert = tl.load(experts_ptr + lane, mask=lane < num_experts, other=-1)
    listed = expert >= 0
    start = tl.load(offsets_ptr + expert, mask=listed, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=listed, other=0)
    tiles = tl.cdiv(end - start, BLOCK_M)
    first = tl.cumsum(tiles, 0) - tiles
    for i in range(0, tl.max(tiles)):
        owned = i < tiles
        tl.store(tile_expert_ptr + first + i, expert, mask=owned)
        tl.store(tile_start_ptr + first + i, start + i * BLOCK_M, mask=owned)
    for begin in range(tl.sum(tiles), bound, BLOCK_G):
        tl.store(tile_expert_ptr + begin + lane, -1, mask=begin + lane < bound)
        tl.store(tile_start_ptr + begin + lane, 0, mask=begin + lane < bound)


def empty_grouping(ids: Tensor, num_experts: int) -> Grouping:
    """Room for the grouping of ids [T, K]."""
    return Grouping(
        torch.empty(ids.numel(), dtype=torch.int64, device=ids.device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device),
        torch.empty_like(ids, dtype=torch.int32),
    )


def launch_group_pairs(ids: Tensor, num_experts: int, into: Grouping | None = None) -> Grouping:
    """Triton form of `group_pairs`, one launch; ids contiguous."""
    num_pairs = ids.numel()
    grouping = empty_grouping(ids, num_experts) if into is None else into
    # One program more than there are experts places the pairs that are routed nowhere.
    _group_kernel[(num_experts + 1,)](
        ids, *grouping, num_pairs, TOP_K=ids.shape[1],
        BLOCK=min(1024, max(64, triton.next_power_of_2(num_pairs))), num_warps=4,
    )  # fmt: skip
    return grouping


def launch_tiles_of(grouping: Grouping, experts: Tensor, block_m: int) -> Tiles:
    """Triton form of `tiles_of`, without a host sync."""
    bound = num_tiles(grouping.order.numel(), experts.numel(), block_m)
    tiles = Tiles(experts.new_empty(bound), experts.new_empty(bound))
    _tiles_kernel[(1,)](
        grouping.offsets, experts, *tiles, experts.numel(), bound,
        # Of all experts, not of the group: one kernel for groups of every size.
        BLOCK_M=block_m, BLOCK_G=triton.next_power_of_2(grouping.offsets.numel()),
    )  # fmt: skip
    return tiles
