"""Finds the first slots of the giving order without sorting all of them.

The order of slots is by (key, tie): empty slots first, residents by key and id. Slots are dealt
over LANES lanes, and the d-th smallest of the lanes' minima bounds the d first slots from above.
What lies under that bound is little more than d slots unless low keys crowd into few lanes; the
caller compares those pairwise, and falls back to `extract` where they are more than LANES.

Of the d first slots (d distinct ids of the step) at most `hits` hold an id that the step needs,
so the `misses` slots to give are among them, whatever is protected.
"""

import triton
import triton.language as tl

_FIRST_KEY = tl.constexpr(-(2**63))
_LAST_KEY = tl.constexpr(2**63 - 1)
_FIRST_TIE = tl.constexpr(-(2**31))
_LAST_TIE = tl.constexpr(2**31 - 1)


@triton.jit
def giving_rank(
    slot: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor, num_ids: tl.tensor,
    num_slots: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(key, tie) of slots, needed or not: empty ones first, slots past the end last."""
    inside = slot < num_slots
    held = tl.load(id_of_ptr + slot, mask=inside, other=0)
    key = tl.load(keys_ptr + held, mask=inside, other=_LAST_KEY)
    empty = held == num_ids
    # A negative tie sets empty slots before a resident whose key is also the least int64.
    key = tl.where(inside & empty, _FIRST_KEY, key)
    tie = tl.where(empty, slot - num_slots, held)
    return key, tl.where(inside, tie, _LAST_TIE)


@triton.jit
def before(key_a: tl.tensor, tie_a: tl.tensor, key_b: tl.tensor, tie_b: tl.tensor) -> tl.tensor:
    return (key_a < key_b) | ((key_a == key_b) & (tie_a < tie_b))


@triton.jit
def _least(key: tl.tensor, tie: tl.tensor, axis: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    least = tl.min(key, axis=axis)
    bound = least if axis is None else tl.expand_dims(least, axis)
    return least, tl.min(tl.where(key == bound, tie, _LAST_TIE), axis=axis)


@triton.jit
def bound(
    id_of_ptr: tl.tensor, keys_ptr: tl.tensor, num_ids: tl.tensor, num_slots: tl.tensor,
    num: tl.tensor, LANES: tl.constexpr, COLS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The num-th smallest (key, tie) among the lanes' minima."""
    lane = tl.arange(0, LANES)
    column = tl.arange(0, COLS)
    key = tl.full((LANES,), _LAST_KEY, tl.int64)
    tie = tl.full((LANES,), _LAST_TIE, tl.int32)
    for begin in range(0, num_slots, LANES * COLS):
        slot = begin + column[:, None] * LANES + lane[None, :]
        keys, ties = giving_rank(slot, id_of_ptr, keys_ptr, num_ids, num_slots)
        least, least_tie = _least(keys, ties, 0)
        better = before(least, least_tie, key, tie)
        key = tl.where(better, least, key)
        tie = tl.where(better, least_tie, tie)
    ahead = before(key[None, :], tie[None, :], key[:, None], tie[:, None])
    chosen = tl.sum(ahead.to(tl.int32), axis=1) == num - 1
    return tl.sum(tl.where(chosen, key, 0)), tl.sum(tl.where(chosen, tie, 0))


@triton.jit
def collect(
    scratch_ptr: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor, num_ids: tl.tensor,
    num_slots: tl.tensor, bound_key: tl.tensor, bound_tie: tl.tensor, LANES: tl.constexpr,
    SCAN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the slots up to the bound to scratch, at most LANES; returns how many there are."""
    count = 0
    for begin in range(0, num_slots, SCAN):
        slot = begin + tl.arange(0, SCAN)
        key, tie = giving_rank(slot, id_of_ptr, keys_ptr, num_ids, num_slots)
        under = ((slot < num_slots) & ~before(bound_key, bound_tie, key, tie)).to(tl.int32)
        place = count + tl.cumsum(under, 0) - under
        tl.store(scratch_ptr + place, slot, mask=(under > 0) & (place < LANES))
        count += tl.sum(under)
    return count


@triton.jit
def extract(
    scratch_ptr: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor, num_ids: tl.tensor,
    num_slots: tl.tensor, num: tl.tensor, SCAN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the num first slots to scratch, one pass over all slots for each."""
    last_key = tl.full((), _FIRST_KEY, tl.int64)
    last_tie = tl.full((), _FIRST_TIE, tl.int32)
    for i in range(0, num):
        next_key = tl.full((), _LAST_KEY, tl.int64)
        next_tie = tl.full((), _LAST_TIE, tl.int32)
        next_slot = tl.full((), 0, tl.int32)
        for begin in range(0, num_slots, SCAN):
            slot = begin + tl.arange(0, SCAN)
            key, tie = giving_rank(slot, id_of_ptr, keys_ptr, num_ids, num_slots)
            later = before(last_key, last_tie, key, tie)
            key = tl.where(later, key, _LAST_KEY)
            tie = tl.where(later, tie, _LAST_TIE)
            least, least_tie = _least(key, tie, None)
            at = tl.max(tl.where((key == least) & (tie == least_tie), slot, 0))
            better = before(least, least_tie, next_key, next_tie)
            next_key = tl.where(better, least, next_key)
            next_tie = tl.where(better, least_tie, next_tie)
            next_slot = tl.where(better, at, next_slot)
        tl.store(scratch_ptr + i, next_slot)
        last_key = next_key
        last_tie = next_tie
    return num
