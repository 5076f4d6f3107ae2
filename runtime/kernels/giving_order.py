"""Finds the first slots of the giving order without sorting all of them, spread over programs.

The order is by (key, tie): empty slots first, then residents by key and id; slots whose resident
the step needs are dead and come last. Two stages, with every program done with the first before
any begins the second:

1. `write_list`: the slots are dealt over lists programs, LENGTH to each, and each sorts its own by
   comparing all pairs. So every slot and key is read once, by many multiprocessors at a time.
2. `give`: each program ranks the FIRST slots of its own list among the FIRST of all lists, and
   gives away those that rank below the number of copies. That is exact unless the low keys crowd
   into one list: where a list is cut before a slot that is to be given, the rank of that slot may
   be too low, and the program ranks its whole list among all whole lists instead.
"""

import triton
import triton.language as tl

_FIRST_KEY = tl.constexpr(-(2**63))
_LAST_KEY = tl.constexpr(2**63 - 1)
_DEAD_TIE = tl.constexpr(2**31 - 1 - 64)  # no id reaches it; a list has at most 64 dead slots
_PAIRS = tl.constexpr(4096)  # compared at a time
_CUT = tl.constexpr(1 << 19)  # above every rank


@triton.jit
def before(key_a: tl.tensor, tie_a: tl.tensor, key_b: tl.tensor, tie_b: tl.tensor) -> tl.tensor:
    return (key_a < key_b) | ((key_a == key_b) & (tie_a < tie_b))


@triton.jit
def dealt_slots(program: tl.tensor, lists: tl.tensor, LENGTH: tl.constexpr) -> tl.tensor:
    """The slots of a list: one of each row of lists slots.

    Rows are turned against each other, so that neither neighbours nor slots an even stride apart,
    which a policy may well have filled together, meet in one list.
    """
    row = tl.arange(0, LENGTH)
    return row * lists + (program + row) % tl.maximum(lists, 1)


@triton.jit
def write_list(
    list_key_ptr: tl.tensor, list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor, slot: tl.tensor,
    held: tl.tensor, key: tl.tensor, wanted: tl.tensor, num_ids: tl.tensor,
    first_slot: tl.tensor, num_slots: tl.tensor, program: tl.tensor, lists: tl.tensor,
    LENGTH: tl.constexpr,
) -> None:  # fmt: skip
    """Sorts a program's slots and writes them; place p of all lists lies together, at p * lists.

    slot counts from first_slot, where the num_slots slots begin that may be given. held and key
    [LENGTH] are what they hold; wanted [N] has negative ids for none.
    """
    # Sums run over axis 0 throughout: the default layouts keep that axis within a thread first.
    needed = tl.sum((wanted[:, None] == held[None, :]).to(tl.int32), axis=0) > 0
    dead = needed | (slot >= num_slots)
    empty = held == num_ids
    # A negative tie sets empty slots before a resident whose key is also the least int64.
    key = tl.where(dead, _LAST_KEY, tl.where(empty, _FIRST_KEY, key))
    tie = tl.where(empty, slot - num_slots, held)
    # Dead slots differ in tie too, so that every slot has its own place.
    tie = tl.where(dead, _DEAD_TIE + tl.arange(0, LENGTH), tie)
    lower = before(key[:, None], tie[:, None], key[None, :], tie[None, :])
    at = tl.sum(lower.to(tl.int32), axis=0) * lists + program
    tl.store(list_key_ptr + at, key)
    tl.store(list_tie_ptr + at, tie)
    tl.store(list_slot_ptr + at, first_slot + slot)


@triton.jit
def _give_first(
    list_key_ptr: tl.tensor, list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor,
    slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, copy_expert_ptr: tl.tensor,
    copy_slot_ptr: tl.tensor, moves_ptr: tl.tensor, evictions_ptr: tl.tensor,
    total_ptr: tl.tensor, base: tl.tensor, copies: tl.tensor, num: tl.tensor, num_ids: tl.tensor,
    program: tl.tensor, lists: tl.tensor, FIRST: tl.constexpr, CUT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gives away, or returns 1 with nothing done where lists cut at FIRST do not suffice."""
    place = tl.arange(0, FIRST)
    at = place * lists + program
    key = tl.load(list_key_ptr + at)
    tie = tl.load(list_tie_ptr + at)
    slot = tl.load(list_slot_ptr + at)
    rank = tl.zeros((FIRST,), tl.int32)
    if CUT:
        rank += tl.where(place == FIRST - 1, _CUT, 0)
    CHUNK: tl.constexpr = min(_PAIRS.value // FIRST, 512)
    for begin in range(0, FIRST * lists, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        inside = other < FIRST * lists
        other_key = tl.load(list_key_ptr + other, mask=inside, other=_LAST_KEY)
        other_tie = tl.load(list_tie_ptr + other, mask=inside, other=_DEAD_TIE)
        lower = before(other_key[:, None], other_tie[:, None], key[None, :], tie[None, :])
        if CUT:
            # A list whose last place is reached may go on below this slot: one sum tells both.
            weight = tl.where(other >= (FIRST - 1) * lists, 1 + _CUT, 1)
            rank += tl.sum(tl.where(lower, weight[:, None], 0), axis=0)
        else:
            rank += tl.sum(lower.to(tl.int32), axis=0)
    given = ((rank & (_CUT - 1)) < copies) & (tie < _DEAD_TIE)
    crowded = tl.max((given & (rank >= _CUT)).to(tl.int32))
    if CUT:
        given = given & ((rank & (_CUT - 1)) < (1 - crowded) * copies)
    expert = tl.load(copy_expert_ptr + rank, mask=given, other=0)
    evicted = given & (tie >= 0)
    tl.store(slot_of_ptr + tie, -1, mask=evicted)
    tl.store(slot_of_ptr + base + expert, slot, mask=given)
    tl.store(id_of_ptr + slot, base + expert, mask=given)
    tl.store(copy_slot_ptr + rank, slot, mask=given)
    if moves_ptr is not None:
        tl.store(moves_ptr + rank, (base + expert).to(tl.int64), mask=given)
        gone = tl.where(evicted, tie, num_ids).to(tl.int64)
        tl.store(moves_ptr + num + rank, gone, mask=given)
    evictions = tl.sum(evicted.to(tl.int32))
    tl.atomic_add(evictions_ptr, evictions, mask=evictions > 0, sem="relaxed")
    if total_ptr is not None:
        tl.atomic_add(total_ptr, evictions.to(tl.int64), mask=evictions > 0, sem="relaxed")
    return crowded


@triton.jit
def give(
    list_key_ptr: tl.tensor, list_tie_ptr: tl.tensor, list_slot_ptr: tl.tensor,
    slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, copy_expert_ptr: tl.tensor,
    copy_slot_ptr: tl.tensor, moves_ptr: tl.tensor, evictions_ptr: tl.tensor,
    total_ptr: tl.tensor, base: tl.tensor, copies: tl.tensor, num: tl.tensor, num_ids: tl.tensor,
    program: tl.tensor, lists: tl.tensor, LENGTH: tl.constexpr, FIRST: tl.constexpr,
) -> None:  # fmt: skip
    """The j-th slot of the giving order goes to the j-th expert to be copied, j < copies.

    moves [2, num], where given: whom the j-th slot takes in, and whom it loses (num_ids: nobody).
    """
    crowded = _give_first(
        list_key_ptr, list_tie_ptr, list_slot_ptr, slot_of_ptr, id_of_ptr, copy_expert_ptr,
        copy_slot_ptr, moves_ptr, evictions_ptr, total_ptr, base, copies, num, num_ids, program,
        lists, FIRST, FIRST < LENGTH,
    )  # fmt: skip
    if FIRST < LENGTH:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if crowded > 0:
            _give_first(
                list_key_ptr, list_tie_ptr, list_slot_ptr, slot_of_ptr, id_of_ptr,
                copy_expert_ptr, copy_slot_ptr, moves_ptr, evictions_ptr, total_ptr, base, copies,
                num, num_ids, program, lists, LENGTH, False,
            )  # fmt: skip
