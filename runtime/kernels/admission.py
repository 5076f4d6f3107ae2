"""Look-up, victim choice, map update and copy list of one step, in two launches.

Equals `runtime.admission` (`distinct`, `admit` with everything admitted, `copy_list`), which is
the definition; `giving_order.py` holds the choice of slots.

Words: an id is global, `layer * E + expert`; `num_ids` as an id means "none".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.giving_order import dealt_slots, give, write_list

MAX_IDS = 128
NO_COPY = -1
_MAX_SLOTS = 1 << 16
_LIST_LENGTH = 64  # slots to a program
_RARE = 1e-3  # steps in which lists cut short do not suffice


class Admitted(NamedTuple):
    """What a step asked for and what must be copied for it."""

    unique: Tensor  # int64 [N] distinct ids ascending, then num_ids
    copy_expert: Tensor  # int32 [N] layer-local, the first counts[2] are valid, then NO_COPY
    copy_slot: Tensor  # int32 [N] likewise
    counts: Tensor  # int32 [4] lookups (distinct), hits, misses, evictions

    @property
    def num_copies(self) -> Tensor:
        """int32 [1] view of the misses."""
        return self.counts[2:3]


@triton.jit
def _write_request(
    unique_ptr: tl.tensor, copy_expert_ptr: tl.tensor, copy_slot_ptr: tl.tensor,
    counts_ptr: tl.tensor, totals_ptr: tl.tensor, wanted: tl.tensor, missed: tl.tensor,
    num: tl.tensor, base: tl.tensor, num_ids: tl.tensor, N_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Everything that does not depend on the slots that will be given."""
    item = tl.arange(0, N_PAD)
    inside = item < num
    earlier = (wanted[:, None] == wanted[None, :]) & (item[:, None] < item[None, :])
    first = (wanted >= 0) & (tl.sum(earlier.to(tl.int32), axis=0) == 0)
    missing = first & missed
    # One word carries both counts: distinct ids in the low half, missing ones in the high half.
    word = first.to(tl.int32) + (missing.to(tl.int32) << 16)
    ranks = tl.sum(tl.where(wanted[:, None] < wanted[None, :], word[:, None], 0), axis=0)
    rank, miss_rank = ranks & 0xFFFF, ranks >> 16
    words = tl.sum(word)
    distinct, misses = words & 0xFFFF, words >> 16
    tl.store(unique_ptr + rank, wanted.to(tl.int64), mask=first)
    tl.store(unique_ptr + item, num_ids.to(tl.int64), mask=inside & (item >= distinct))
    tl.store(copy_expert_ptr + miss_rank, wanted - base, mask=missing)
    tl.store(copy_expert_ptr + item, -1, mask=inside & (item >= misses))
    tl.store(copy_slot_ptr + item, -1, mask=inside & (item >= misses))
    which = tl.arange(0, 4)
    count = tl.where(which == 0, distinct, tl.where(which == 1, distinct - misses, misses))
    count = tl.where(which == 3, 0, count)  # evictions are added where slots are given
    tl.store(counts_ptr + which, count)
    if totals_ptr is not None:
        total = tl.load(totals_ptr + which)
        tl.store(totals_ptr + which, total + count, mask=which < 3)


@triton.jit(do_not_specialize=["num", "base", "num_experts", "num_ids", "num_slots", "lists"])
def _list_kernel(
    ids_ptr: tl.tensor, slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor,
    unique_ptr: tl.tensor, copy_expert_ptr: tl.tensor, copy_slot_ptr: tl.tensor,
    counts_ptr: tl.tensor, totals_ptr: tl.tensor, list_key_ptr: tl.tensor,
    list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor, num: tl.tensor, base: tl.tensor,
    num_experts: tl.tensor, num_ids: tl.tensor, num_slots: tl.tensor, lists: tl.tensor,
    N_PAD: tl.constexpr, LENGTH: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    item = tl.arange(0, N_PAD)
    expert = tl.load(ids_ptr + item, mask=item < num, other=num_experts).to(tl.int32)
    wanted = tl.where(expert < num_experts, base + expert, -1)
    # Asked for before it is known whether anything misses: a second wait would cost more.
    slot = dealt_slots(program, lists, LENGTH)
    mine = slot < num_slots
    held = tl.load(id_of_ptr + slot, mask=mine, other=0)
    missed = tl.load(slot_of_ptr + wanted, mask=wanted >= 0, other=0) < 0
    key = tl.load(keys_ptr + held, mask=mine, other=0)
    if program == lists:
        _write_request(
            unique_ptr, copy_expert_ptr, copy_slot_ptr, counts_ptr, totals_ptr, wanted, missed,
            num, base, num_ids, N_PAD,
        )  # fmt: skip
    elif tl.max(missed.to(tl.int32)) > 0:
        write_list(
            list_key_ptr, list_tie_ptr, list_slot_ptr, slot, held, key, wanted, num_ids,
            num_slots, program, lists, LENGTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["base", "lists"])
def _give_kernel(
    slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, copy_expert_ptr: tl.tensor,
    copy_slot_ptr: tl.tensor, counts_ptr: tl.tensor, totals_ptr: tl.tensor,
    list_key_ptr: tl.tensor, list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor, base: tl.tensor,
    lists: tl.tensor, LENGTH: tl.constexpr, FIRST: tl.constexpr,
) -> None:  # fmt: skip
    misses = tl.load(counts_ptr + 2)
    if misses > 0:
        total_ptr = None if totals_ptr is None else totals_ptr + 3
        give(
            list_key_ptr, list_tie_ptr, list_slot_ptr, slot_of_ptr, id_of_ptr, copy_expert_ptr,
            copy_slot_ptr, counts_ptr + 3, total_ptr, base, misses, tl.program_id(0), lists,
            LENGTH, FIRST,
        )  # fmt: skip


def launch_admit(
    ids: Tensor,
    layer: int,
    num_experts: int,
    slot_of: Tensor,
    id_of: Tensor,
    keys: Tensor,
    totals: Tensor | None = None,
) -> Admitted:
    """Makes every id of the step resident. Mutates slot_of and id_of, never keys.

    ids int, N layer-local, repeats allowed, num_experts for none; slot_of int32 [num_ids + 1],
    -1 where absent, its last entry -1; id_of int32 [num_slots], num_ids where empty; keys int64
    [num_ids + 1], lowest evicted first. Needs num_slots >= distinct ids, at most MAX_IDS ids.
    totals int64 [4], where given, grows by the counts.
    """
    num, num_slots = ids.numel(), id_of.numel()
    assert 0 < num <= MAX_IDS, f"{num} ids, at most {MAX_IDS} fit one step"
    assert num_slots <= _MAX_SLOTS, f"{num_slots} slots, at most {_MAX_SLOTS}"
    out = Admitted(
        ids.new_empty(num, dtype=torch.int64),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(4, dtype=torch.int32),
    )
    padded = max(8, triton.next_power_of_2(num))
    lists = triton.cdiv(num_slots, _LIST_LENGTH)
    list_keys = keys.new_empty(lists * _LIST_LENGTH)
    list_ties, list_slots = id_of.new_empty(2, lists * _LIST_LENGTH)
    # One program more than lists: it writes what concerns the request alone.
    _list_kernel[(lists + 1,)](
        ids, slot_of, id_of, keys, *out, totals, list_keys, list_ties, list_slots,
        num, layer * num_experts, num_experts, slot_of.numel() - 1, num_slots, lists,
        N_PAD=padded, LENGTH=_LIST_LENGTH, num_warps=4,
    )  # fmt: skip
    _give_kernel[(lists,)](
        slot_of, id_of, *out[1:], totals, list_keys, list_ties, list_slots,
        layer * num_experts, lists,
        LENGTH=_LIST_LENGTH, FIRST=_first(padded, lists), num_warps=4,
    )  # fmt: skip
    return out


@lru_cache
def _first(num: int, lists: int) -> int:
    """How many slots of each list to rank: few, yet one list with so many of the first `num` slots
    in giving order, which makes its program rank everything, must be very unlikely.

    Slots are dealt evenly, so a list's share is close to a Poisson variable of mean num / lists.
    """
    first = 4
    while first < _LIST_LENGTH and lists * _poisson_tail(first, num / lists) > _RARE:
        first *= 2
    return first


def _poisson_tail(least: int, mean: float) -> float:
    """Probability of `least` or more."""
    below = sum(mean**k / math.factorial(k) for k in range(least))
    return max(0.0, 1.0 - math.exp(-mean) * below)
