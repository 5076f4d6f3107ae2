"""The touch of the `succession` policy in one launch.

Equals `Succession.touch`, which is the definition, bit for bit in all tensors of its state.

Programs share out a layer's experts by columns of its followers. Each reads the rows of the sources
and of the experts used now, in its columns alone, and writes what concerns its own experts. What
one writes and another reads must read alike before and after:

    costs, CRF    become 0, and what is faded plus one, for the ids; every program knows those
    sources       are written by the program that comes last, when all have read the old ones

Words: `_E` rows of experts that others follow, `_C` columns of a program, `_I` ids at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.policies.cache.succession import ONE, WEIGHT_BITS, Succession
from residency.policies.step import Phase, Step

_COLUMNS = 8  # to a program: of int32, one sector of a row
_IDS = 64  # compared with the experts at a time


@triton.jit
def _write_ids(
    unique_ptr: tl.tensor, token_ptr: tl.tensor, evidence_ptr: tl.tensor, last_ptr: tl.tensor,
    costs_ptr: tl.tensor, faded_ptr: tl.tensor, num: tl.tensor, ONE: tl.constexpr,
    IDS: tl.constexpr,
) -> None:  # fmt: skip
    """What concerns the ids alone, whatever layer they are of; the sink among them."""
    token = tl.load(token_ptr)
    for begin in range(0, num, IDS):
        item = begin + tl.arange(0, IDS)
        inside = item < num
        ids = tl.load(unique_ptr + item, mask=inside, other=0)
        faded = tl.load(faded_ptr + ids, mask=inside, other=0)
        tl.store(evidence_ptr + 2 * ids, faded + ONE, mask=inside)
        tl.store(last_ptr + ids, token + tl.zeros((IDS,), tl.int64), mask=inside)
        tl.store(costs_ptr + ids, tl.zeros((IDS,), tl.int64), mask=inside)


@triton.jit
def _log2(number: tl.tensor) -> tl.tensor:
    """Of int64 [C], as fp32's bits have it: int64 [C]."""
    return number.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["num", "first"])
def _touch_kernel(
    unique_ptr: tl.tensor, token_ptr: tl.tensor, evidence_ptr: tl.tensor, last_ptr: tl.tensor,
    merits_ptr: tl.tensor, costs_ptr: tl.tensor, faded_ptr: tl.tensor, keys_ptr: tl.tensor,
    followers_ptr: tl.tensor, sources_ptr: tl.tensor, arrivals_ptr: tl.tensor, num: tl.tensor,
    first: tl.tensor, E: tl.constexpr, E_PAD: tl.constexpr, SHIFT: tl.constexpr,
    ONE: tl.constexpr, WEIGHT: tl.constexpr, WEIGHT_OF_FOLLOW: tl.constexpr,
    LEARNS: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    program, blocks = tl.program_id(0), tl.num_programs(0) - 1
    if program == blocks:
        _write_ids(
            unique_ptr, token_ptr, evidence_ptr, last_ptr, costs_ptr, faded_ptr, num, ONE, IDS
        )  # fmt: skip
    else:
        row = tl.arange(0, E_PAD)
        column = program * COLUMNS + tl.arange(0, COLUMNS)
        mine = column < E
        own = first + column
        # Asked for before the ids are known, so that one wait is enough for all.
        cost_C = tl.load(costs_ptr + own, mask=mine, other=1)
        faded_C = tl.load(faded_ptr + own, mask=mine, other=0)
        crf_C = tl.load(evidence_ptr + 2 * own, mask=mine, other=1)
        if LEARNS:
            cost_E = tl.load(costs_ptr + first + row, mask=row < E, other=1)
            source_E = tl.load(sources_ptr + first + row, mask=row < E, other=0)
        named_E = tl.zeros((E_PAD,), tl.int32)
        named_C = tl.zeros((COLUMNS,), tl.int32)
        for begin in range(0, num, IDS):
            item = begin + tl.arange(0, IDS)
            id_I = tl.load(unique_ptr + item, mask=item < num, other=-1)
            expert_I = tl.where(id_I < 0, -1, id_I - first).to(tl.int32)[:, None]
            named_C += tl.sum((expert_I == column[None, :]).to(tl.int32), axis=0)
            if LEARNS:
                named_E += tl.sum((expert_I == row[None, :]).to(tl.int32), axis=0)

        if LEARNS:
            used_E = ((named_E > 0) | (cost_E == 0)) & (row < E)
            changing = source_E[:, None]
            place = (first + row)[:, None] * E + column[None, :]
            read = ((changing != 0) | used_E[:, None]) & mine[None, :]
            followers = tl.load(followers_ptr + place, mask=read, other=0)
            used_C = (named_C > 0) | (cost_C == 0)
            gain_C = tl.where(used_C, ONE >> SHIFT, 0)
            followers += (gain_C[None, :] - (followers >> SHIFT)) * changing
            tl.store(followers_ptr + place, followers, mask=read & (changing != 0))
            follow_C = tl.sum(tl.where(used_E[:, None], followers, 0).to(tl.int64), axis=0)
            tl.store(evidence_ptr + 2 * own + 1, follow_C, mask=mine)
        else:
            follow_C = tl.load(evidence_ptr + 2 * own + 1, mask=mine, other=1)
            tl.store(sources_ptr + own, tl.zeros((COLUMNS,), tl.int32), mask=mine)

        crf_C = tl.where(named_C > 0, faded_C + ONE, crf_C)
        merit_C = _log2(crf_C) * WEIGHT + _log2(follow_C) * WEIGHT_OF_FOLLOW
        tl.store(merits_ptr + own, merit_C, mask=mine)
        tl.store(keys_ptr + own, merit_C - tl.where(named_C > 0, 0, cost_C), mask=mine)

        if LEARNS:
            # All threads have read the sources before their program arrives.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
            if arrived == blocks - 1:
                tl.store(arrivals_ptr, 0)
                tl.store(sources_ptr + first + row, used_E.to(tl.int32), mask=row < E)


def launch_succession(policy: Succession, unique: Tensor, step: Step, arrivals: Tensor) -> None:
    """`policy.touch(unique, step)`; unique int64 [N], arrivals from `new_arrivals`."""
    num_experts = policy.space.num_experts
    _touch_kernel[(triton.cdiv(num_experts, _COLUMNS) + 1,)](
        unique, step.token, policy.evidence, policy.last, policy.merits, policy.costs,
        policy.faded, policy.keys, policy.followers, policy.sources, arrivals, unique.numel(),
        step.layer * num_experts, E=num_experts, E_PAD=triton.next_power_of_2(num_experts),
        SHIFT=policy.shift, ONE=ONE, WEIGHT=1 << WEIGHT_BITS,
        WEIGHT_OF_FOLLOW=policy.weight_of_follow, LEARNS=step.phase is Phase.DECODE,
        IDS=min(_IDS, max(16, triton.next_power_of_2(unique.numel()))), COLUMNS=_COLUMNS,
        num_warps=8,
    )  # fmt: skip


def new_arrivals(device: torch.device) -> Tensor:
    """int32 [1], zero before and after each launch; no two launches may use it at once."""
    return torch.zeros(1, dtype=torch.int32, device=device)
