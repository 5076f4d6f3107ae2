"""Look-up, victim choice, map update and copy list of one step, in two launches.

Equals `runtime.admission` (`distinct`, `admit` with everything admitted that the quota lets pass,
`copy_list`), which is the definition; `giving_order.py` holds the choice of slots.

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

from residency.runtime.kernels.giving_order import before, dealt_slots, give, write_list

MAX_IDS = 128
NO_COPY = -1
_MAX_SLOTS = 1 << 16
_LIST_LENGTH = 64  # slots to a program
_RARE = 1e-3  # steps in which lists cut short do not suffice


class Admitted(NamedTuple):
    """What a step asked for and what must be copied for it."""

    unique: Tensor  # int64 [N] distinct ids ascending, then num_ids
    copy_expert: Tensor  # int32 [N] layer-local, the first counts[5] are valid, then NO_COPY
    copy_slot: Tensor  # int32 [N] likewise
    host_expert: Tensor  # int32 [N] layer-local, of the ids that the host computes; others NO_COPY
    counts: Tensor  # int32 [6] lookups (distinct), hits, misses, evictions, computed, fetched

    @property
    def num_copies(self) -> Tensor:
        """int32 [1] view of the experts that are fetched."""
        return self.counts[5:6]


@triton.jit
def _write_request(
    unique_ptr: tl.tensor, copy_expert_ptr: tl.tensor, copy_slot_ptr: tl.tensor,
    host_expert_ptr: tl.tensor, counts_ptr: tl.tensor, totals_ptr: tl.tensor,
    keys_ptr: tl.tensor, quota_ptr: tl.tensor, wanted: tl.tensor, missed: tl.tensor,
    num: tl.tensor, base: tl.tensor, num_ids: tl.tensor, N_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Everything that does not depend on the slots that will be given."""
    item = tl.arange(0, N_PAD)
    inside = item < num
    earlier = (wanted[:, None] == wanted[None, :]) & (item[:, None] < item[None, :])
    first = (wanted >= 0) & (tl.sum(earlier.to(tl.int32), axis=0) == 0)
    missing = first & missed
    fetched = missing
    if quota_ptr is not None:
        key = tl.load(keys_ptr + wanted, mask=missing, other=0)
        higher = before(key[None, :], wanted[None, :], key[:, None], wanted[:, None])
        above = tl.sum((higher & missing[:, None]).to(tl.int32), axis=0)
        quota = tl.load(quota_ptr + tl.sum(missing.to(tl.int32)))
        fetched = missing & (above < quota)
    # One word carries both counts: distinct ids in the low half, fetched ones in the high half.
    word = first.to(tl.int32) + (fetched.to(tl.int32) << 16)
    ranks = tl.sum(tl.where(wanted[:, None] < wanted[None, :], word[:, None], 0), axis=0)
    rank, copy_rank = ranks & 0xFFFF, ranks >> 16
    words = tl.sum(word)
    distinct, copies = words & 0xFFFF, words >> 16
    misses = tl.sum(missing.to(tl.int32))
    tl.store(unique_ptr + rank, wanted.to(tl.int64), mask=first)
    tl.store(unique_ptr + item, num_ids.to(tl.int64), mask=inside & (item >= distinct))
    tl.store(copy_expert_ptr + copy_rank, wanted - base, mask=fetched)
    tl.store(copy_expert_ptr + item, -1, mask=inside & (item >= copies))
    tl.store(copy_slot_ptr + item, -1, mask=inside & (item >= copies))
    tl.store(host_expert_ptr + item, tl.where(missing & ~fetched, wanted - base, -1), mask=inside)
    which = tl.arange(0, 8)
    count = tl.where(which == 0, distinct, tl.where(which == 1, distinct - misses, misses))
    count = tl.where(which == 3, 0, count)  # evictions are added where slots are given
    count = tl.where(which == 4, misses - copies, tl.where(which == 5, copies, count))
    tl.store(counts_ptr + which, count, mask=which < 6)
    if totals_ptr is not None:
        summed = (which < 5) & (which != 3)
        total = tl.load(totals_ptr + which, mask=summed, other=0)
        tl.store(totals_ptr + which, total + count, mask=summed)


@triton.jit(
    do_not_specialize=[
        *("num", "base", "num_experts", "num_ids", "first_slot", "num_slots", "lists")
    ]
)
def _list_kernel(
    ids_ptr: tl.tensor, slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor,
    quota_ptr: tl.tensor, unique_ptr: tl.tensor, copy_expert_ptr: tl.tensor,
    copy_slot_ptr: tl.tensor, host_expert_ptr: tl.tensor, counts_ptr: tl.tensor,
    totals_ptr: tl.tensor, list_key_ptr: tl.tensor, list_tie_ptr: tl.tensor,
    list_slot_ptr: tl.tensor, num: tl.tensor, base: tl.tensor, num_experts: tl.tensor,
    num_ids: tl.tensor, first_slot: tl.tensor, num_slots: tl.tensor, lists: tl.tensor,
    N_PAD: tl.constexpr, LENGTH: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    item = tl.arange(0, N_PAD)
    expert = tl.load(ids_ptr + item, mask=item < num, other=num_experts).to(tl.int32)
    wanted = tl.where(expert < num_experts, base + expert, -1)
    # Asked for before it is known whether anything misses: a second wait would cost more.
    slot = dealt_slots(program, lists, LENGTH)
    mine = slot < num_slots
    held = tl.load(id_of_ptr + first_slot + slot, mask=mine, other=0)
    missed = tl.load(slot_of_ptr + wanted, mask=wanted >= 0, other=0) < 0
    key = tl.load(keys_ptr + held, mask=mine, other=0)
    if program == lists:
        _write_request(
            unique_ptr, copy_expert_ptr, copy_slot_ptr, host_expert_ptr, counts_ptr, totals_ptr,
            keys_ptr, quota_ptr, wanted, missed, num, base, num_ids, N_PAD,
        )  # fmt: skip
    elif tl.max(missed.to(tl.int32)) > 0:
        write_list(
            list_key_ptr, list_tie_ptr, list_slot_ptr, slot, held, key, wanted, num_ids,
            first_slot, num_slots, program, lists, LENGTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["base", "num", "num_ids", "lists"])
def _give_kernel(
    slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, copy_expert_ptr: tl.tensor,
    copy_slot_ptr: tl.tensor, moves_ptr: tl.tensor, counts_ptr: tl.tensor, totals_ptr: tl.tensor,
    list_key_ptr: tl.tensor, list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor, base: tl.tensor,
    num: tl.tensor, num_ids: tl.tensor, lists: tl.tensor, LENGTH: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:  # fmt: skip
    copies = tl.load(counts_ptr + 5)
    if copies > 0:
        total_ptr = None if totals_ptr is None else totals_ptr + 3
        give(
            list_key_ptr, list_tie_ptr, list_slot_ptr, slot_of_ptr, id_of_ptr, copy_expert_ptr,
            copy_slot_ptr, moves_ptr, counts_ptr + 3, total_ptr, base, copies, num, num_ids,
            tl.program_id(0), lists, LENGTH, FIRST,
        )  # fmt: skip


def launch_admit(
    ids: Tensor,
    layer: int,
    num_experts: int,
    slot_of: Tensor,
    id_of: Tensor,
    keys: Tensor,
    totals: Tensor | None = None,
    quota: Tensor | None = None,
    moves: Tensor | None = None,
    slots: range | None = None,
) -> Admitted:
    """Makes every id of the step resident that the quota lets pass. Mutates slot_of and id_of.

    ids int, N layer-local, repeats allowed, num_experts for none; slot_of int32 [num_ids + 1],
    -1 where absent, its last entry -1; id_of int32 [num_slots], num_ids where empty; keys int64
    [num_ids + 1], lowest evicted first. slots: those that may be given, None for all; as many as
    there are distinct ids, among which the step's residents lie. At most MAX_IDS ids.
    totals int64 [5], where given, grows by the first counts. quota int32 [E + 1]: of m missing ids
    the quota[m] highest by (key, id) are fetched; None for all. Where none ever is, slots may be
    empty. moves int64 [2, N], where given, num_ids throughout, is filled from the front with the
    ids that were given a slot, ascending, and below each whom it displaced.
    """
    slots = range(id_of.numel()) if slots is None else slots
    num, num_slots = ids.numel(), len(slots)
    assert 0 < num <= MAX_IDS, f"{num} ids, at most {MAX_IDS} fit one step"
    assert num_slots <= _MAX_SLOTS, f"{num_slots} slots, at most {_MAX_SLOTS}"
    out = Admitted(
        ids.new_empty(num, dtype=torch.int64),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(6, dtype=torch.int32),
    )
    padded = max(8, triton.next_power_of_2(num))
    lists = triton.cdiv(num_slots, _LIST_LENGTH)
    list_keys = keys.new_empty(lists * _LIST_LENGTH)
    list_ties, list_slots = id_of.new_empty(2, lists * _LIST_LENGTH)
    # One program more than lists: it writes what concerns the request alone.
    _list_kernel[(lists + 1,)](
        ids, slot_of, id_of, keys, quota, *out, totals, list_keys, list_ties, list_slots,
        num, layer * num_experts, num_experts, slot_of.numel() - 1, slots.start, num_slots, lists,
        N_PAD=padded, LENGTH=_LIST_LENGTH, num_warps=4,
    )  # fmt: skip
    if lists == 0:
        return out
    _give_kernel[(lists,)](
        slot_of, id_of, out.copy_expert, out.copy_slot, moves, out.counts, totals, list_keys,
        list_ties, list_slots, layer * num_experts, num, slot_of.numel() - 1, lists,
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
