"""Hands a layer's step to the host, and keeps the times of both sides.

Times are nanoseconds of the device's own clock, written where a step passes: STATS numbers a layer,
int64, in the order of `Stat`. Triton's interpreter has no such clock; `timed` is false there.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


class Stat(IntEnum):
    """The columns of the statistics, one row a layer."""

    BEGIN = 0
    FETCH_END = 1
    HOST_END = 2
    COMPUTED = 3
    FETCHED = 4


_BLOCK = 1024  # of the hidden states, to a program
_EXPERTS = 64  # compared with the list at a time


@triton.jit(do_not_specialize=["num", "num_experts", "num_bytes"])
def _publish_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, host_expert_ptr: tl.tensor,
    counts_ptr: tl.tensor, x_out_ptr: tl.tensor, ids_out_ptr: tl.tensor,
    weights_out_ptr: tl.tensor, chosen_ptr: tl.tensor, stats_ptr: tl.tensor,
    bytes_ptr: tl.tensor, num_x: tl.tensor, num: tl.tensor, num_experts: tl.tensor,
    num_bytes: tl.tensor, BLOCK: tl.constexpr, N_PAD: tl.constexpr, EXPERTS: tl.constexpr,
    TIMED: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    if program > 0:
        place = (program - 1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < num_x)
        tl.store(x_out_ptr + place, x, mask=place < num_x)
    else:
        if TIMED:
            tl.store(stats_ptr, globaltimer())
        item = tl.arange(0, N_PAD)
        inside = item < num
        ids = tl.load(ids_ptr + item, mask=inside, other=0)
        tl.store(ids_out_ptr + item, ids.to(tl.int32), mask=inside)
        weights = tl.load(weights_ptr + item, mask=inside, other=0.0)
        tl.store(weights_out_ptr + item, weights.to(tl.float32), mask=inside)
        listed = tl.load(host_expert_ptr + item, mask=inside, other=-1)
        for begin in range(0, num_experts, EXPERTS):
            expert = begin + tl.arange(0, EXPERTS)
            named = tl.sum((listed[:, None] == expert[None, :]).to(tl.int32), axis=0)
            tl.store(chosen_ptr + expert, (named > 0).to(tl.uint8), mask=expert < num_experts)
        tl.store(stats_ptr + 3, tl.load(counts_ptr + 4).to(tl.int64))
        tl.store(stats_ptr + 4, tl.load(counts_ptr + 5).to(tl.int64))
        tl.store(bytes_ptr, tl.load(bytes_ptr) + num_bytes)


@triton.jit
def _stamp_kernel(place_ptr: tl.tensor) -> None:
    tl.store(place_ptr, globaltimer())


def launch_publish(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    host_expert: Tensor,
    counts: Tensor,
    x_out: Tensor,
    ids_out: Tensor,
    weights_out: Tensor,
    chosen: Tensor,
    stats: Tensor,
    moved: Tensor,
    num_bytes: int,
    timed: bool = True,
) -> None:
    """Copies a step's input to host memory and marks the experts that the host computes.

    x [T, H]; ids int [T, K]; weights [T, K]; host_expert int32 [T * K], -1 for none; counts int32
    [6], as `admission.Admitted` has them. Pinned: x_out [T, H] of x's dtype, ids_out int32 [T, K],
    weights_out fp32 [T, K], chosen uint8 [E]. stats: int64, a row of the statistics. moved int64
    [1] grows by num_bytes. All contiguous.
    """
    blocks = triton.cdiv(x.numel(), _BLOCK)
    _publish_kernel[(blocks + 1,)](
        x, ids, weights, host_expert, counts, x_out, ids_out, weights_out, chosen, stats, moved,
        x.numel(), ids.numel(), chosen.numel(), num_bytes,
        BLOCK=_BLOCK, N_PAD=max(8, triton.next_power_of_2(ids.numel())), EXPERTS=_EXPERTS,
        TIMED=timed, num_warps=4,
    )  # fmt: skip


def launch_stamp(place: Tensor) -> None:
    """place int64 [1] becomes the device's time, when the stream gets there."""
    _stamp_kernel[(1,)](place, num_warps=1)


def new_stats(num_layers: int, device: torch.device) -> Tensor:
    """int64 [L, len(Stat)], zeros."""
    return torch.zeros(num_layers, len(Stat), dtype=torch.int64, device=device)
