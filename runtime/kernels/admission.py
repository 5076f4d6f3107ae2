"""Look-up, victim choice, map update and copy list of one step, in one or two launches.

Equals `runtime.admission` (`distinct`, `admit` with everything admitted, `copy_list`), which is
the definition; `giving_order.py` holds the choice of slots.

Words: an id is global, `layer * E + expert`; `num_ids` as an id means "none".
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from residency.runtime.kernels.dense import launch_options
from residency.runtime.kernels.giving_order import dealt_slots, give, write_list

MAX_IDS = 128
NO_COPY = -1
_MAX_SLOTS = 1 << 16
# Parts of the kernel that a launch may hold.
_LIST, _GIVE, _BOTH = 1, 2, 3


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


class Form(NamedTuple):
    """How an admission is launched; the result is the same."""

    # Two launches; two, the second started early; one, in which the programs wait for each other.
    launches: Literal["two", "early", "one"]
    list_length: int  # slots to a program, at most 64
    num_warps: int


DEFAULT_FORM = Form("two", list_length=64, num_warps=4)


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


@triton.jit
def _wait_for_all(arrived_ptr: tl.tensor, program: tl.tensor, lists: tl.tensor) -> None:
    """Until all lists + 1 programs are here. Needs all of them to get a multiprocessor.

    The top bit turns once the sum of a round is complete, so the counter is never reset.
    """
    tl.debug_barrier()
    step = tl.where(program == lists, 2**31 - 1 - (lists - 1), 1)
    before = tl.atomic_add(arrived_ptr, step, sem="acq_rel")
    while (tl.atomic_add(arrived_ptr, 0, sem="acquire") ^ before) >= 0:
        pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num", "base", "num_experts", "num_ids", "num_slots", "lists"])
def _admit_kernel(
    ids_ptr: tl.tensor, slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor,
    unique_ptr: tl.tensor, copy_expert_ptr: tl.tensor, copy_slot_ptr: tl.tensor,
    counts_ptr: tl.tensor, totals_ptr: tl.tensor, list_key_ptr: tl.tensor,
    list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor, arrived_ptr: tl.tensor, num: tl.tensor,
    base: tl.tensor, num_experts: tl.tensor, num_ids: tl.tensor, num_slots: tl.tensor,
    lists: tl.tensor, N_PAD: tl.constexpr, LENGTH: tl.constexpr, FIRST: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    giving = True
    if EARLY:
        if PARTS & 1:
            gdc_launch_dependents()
        else:
            gdc_wait()
    if PARTS & 1:
        item = tl.arange(0, N_PAD)
        expert = tl.load(ids_ptr + item, mask=item < num, other=num_experts).to(tl.int32)
        wanted = tl.where(expert < num_experts, base + expert, -1)
        # Asked for before it is known whether anything misses: a second wait would cost more.
        slot = dealt_slots(program, lists, LENGTH)
        mine = slot < num_slots
        held = tl.load(id_of_ptr + slot, mask=mine, other=0)
        missed = tl.load(slot_of_ptr + wanted, mask=wanted >= 0, other=0) < 0
        key = tl.load(keys_ptr + held, mask=mine, other=0)
        giving = tl.max(missed.to(tl.int32)) > 0
        if program == lists:
            _write_request(
                unique_ptr, copy_expert_ptr, copy_slot_ptr, counts_ptr, totals_ptr, wanted,
                missed, num, base, num_ids, N_PAD,
            )  # fmt: skip
        elif giving:
            write_list(
                list_key_ptr, list_tie_ptr, list_slot_ptr, slot, held, key, wanted, num_ids,
                num_slots, program, lists, LENGTH,
            )  # fmt: skip
    if PARTS & 2:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if giving:
            if PARTS & 1:
                _wait_for_all(arrived_ptr, program, lists)
            misses = tl.load(counts_ptr + 2)
            if (misses > 0) & (program < lists):
                total_ptr = None if totals_ptr is None else totals_ptr + 3
                give(
                    list_key_ptr, list_tie_ptr, list_slot_ptr, slot_of_ptr, id_of_ptr,
                    copy_expert_ptr, copy_slot_ptr, counts_ptr + 3, total_ptr, base, misses,
                    program, lists, LENGTH, FIRST,
                )  # fmt: skip


# The meeting point of each pool's programs, by its id_of. Two admissions of one pool may not run
# at the same time anyway.
_arrived: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _meeting_point(id_of: Tensor) -> Tensor | None:
    """int32 [1], or None while capturing: a graph's own memory would not be zero from the start."""
    if id_of not in _arrived and not torch.cuda.is_current_stream_capturing():
        _arrived[id_of] = id_of.new_zeros(1)
    point: Tensor | None = _arrived.get(id_of)
    return point


def launch_admit(
    ids: Tensor,
    layer: int,
    num_experts: int,
    slot_of: Tensor,
    id_of: Tensor,
    keys: Tensor,
    totals: Tensor | None = None,
    form: Form = DEFAULT_FORM,
) -> Admitted:
    """Makes every id of the step resident. Mutates slot_of and id_of, never keys.

    ids int, N layer-local, repeats allowed, num_experts for none; slot_of int32 [num_ids + 1],
    -1 where absent, its last entry -1; id_of int32 [num_slots], num_ids where empty; keys int64
    [num_ids + 1], lowest evicted first. Needs num_slots >= distinct ids, at most MAX_IDS ids.
    totals int64 [4], where given, grows by the counts.
    """
    num, num_slots, length = ids.numel(), id_of.numel(), form.list_length
    assert 0 < num <= MAX_IDS, f"{num} ids, at most {MAX_IDS} fit one step"
    assert num_slots <= _MAX_SLOTS, f"{num_slots} slots, at most {_MAX_SLOTS}"
    out = Admitted(
        ids.new_empty(num, dtype=torch.int64),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(num, dtype=torch.int32),
        ids.new_empty(4, dtype=torch.int32),
    )
    padded = max(8, triton.next_power_of_2(num))
    lists = triton.cdiv(num_slots, length)
    # Few slots to rank, yet a list with that many of the first N slots must be very unlikely.
    first = min(length, max(4, triton.next_power_of_2(triton.cdiv(8 * padded, lists))))
    list_keys = keys.new_empty(lists * length)
    list_ties, list_slots = id_of.new_empty(2, lists * length)
    # A CPU runs programs one after the other, so they cannot wait for each other.
    arrived = _meeting_point(id_of) if form.launches == "one" and id_of.is_cuda else None
    early = form.launches == "early" and id_of.is_cuda
    for parts in (_LIST, _GIVE) if arrived is None else (_BOTH,):
        # One program more than lists: it writes what concerns the request alone.
        _admit_kernel[(lists if parts == _GIVE else lists + 1,)](
            ids, slot_of, id_of, keys, *out, totals, list_keys, list_ties, list_slots, arrived,
            num, layer * num_experts, num_experts, slot_of.numel() - 1, num_slots,
            lists, N_PAD=padded if parts & _LIST else 1, LENGTH=length, FIRST=first, PARTS=parts,
            EARLY=early, num_warps=form.num_warps, **launch_options(early and parts == _GIVE),
        )  # fmt: skip
    return out
