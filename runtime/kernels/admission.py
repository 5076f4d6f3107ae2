"""Look-up, victim choice, map update and copy list of one step: what every cache policy shares.

Words: an id is global, `layer * E + expert`; `num_ids` as an id means "none", and the entry
`[num_ids]` of slot_of and keys is a sink that fixed-shape writes may hit.

Slots are given out in one order, the *giving order*: empty slots by slot number, then residents
that the step does not need by (key, id). The definition sorts all slots; the kernel finds the
first few (`giving_order.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.giving_order import before, bound, collect, extract, giving_rank

MAX_IDS = 64
NO_COPY = -1
_SLOTS_PER_SCAN = 4096


class Admission(NamedTuple):
    """What a step asked for and what must be copied for it."""

    unique: Tensor  # int64 [N] distinct ids ascending, then num_ids
    copy_expert: Tensor  # int32 [N] layer-local, the first counts[2] are valid, then NO_COPY
    copy_slot: Tensor  # int32 [N] likewise
    counts: Tensor  # int32 [4] lookups (distinct), hits, misses, evictions

    @property
    def num_copies(self) -> Tensor:
        """int32 [1] view of the misses."""
        return self.counts[2:3]


def admit(
    ids: Tensor,
    layer: int,
    num_experts: int,
    slot_of: Tensor,
    id_of: Tensor,
    keys: Tensor,
    clock: Tensor | None = None,
) -> Admission:
    """Makes every id of the step resident. Mutates slot_of and id_of, with `clock` also keys.

    ids int [N] layer-local, repeats allowed; slot_of int32 [num_ids + 1], -1 where absent, its
    last entry -1; id_of int32 [num_slots], num_ids where empty; keys int64 [num_ids + 1], lowest
    evicted first. Needs num_slots >= distinct ids. clock int64 [1]: the fused touch of LRU,
    `keys[unique] = clock` after the victims are chosen.
    """
    num_ids, num_slots, num = slot_of.numel() - 1, id_of.numel(), ids.numel()
    unique = _distinct(ids.long() + layer * num_experts, num_ids)
    real = unique < num_ids
    missing = real & (slot_of[unique] < 0)
    rank = missing.cumsum(0) - 1

    giving = _giving_order(unique, id_of, keys)[:num]
    slot = giving[rank.clamp(0, num_slots - 1)]
    victim = torch.where(missing, id_of[slot].long(), num_ids)

    slot_of.scatter_(0, victim, -1)
    slot_of.scatter_(0, torch.where(missing, unique, num_ids), slot.int())
    slot_of[num_ids:] = -1
    held = torch.cat([id_of, id_of.new_empty(1)])
    held.scatter_(0, torch.where(missing, slot, num_slots), unique.int())
    id_of.copy_(held[:-1])
    if clock is not None:
        keys.scatter_(0, unique, clock.expand(num))

    lookups, misses, evictions = real.sum(), missing.sum(), (victim < num_ids).sum()
    expert = unique - layer * num_experts
    return Admission(
        unique,
        _compact(expert, missing, rank),
        _compact(slot, missing, rank),
        torch.stack([lookups, lookups - misses, misses, evictions]).int(),
    )


def _distinct(ids: Tensor, num_ids: int) -> Tensor:
    ordered = ids.sort().values
    repeat = torch.zeros_like(ordered, dtype=torch.bool)
    repeat[1:] = ordered[1:] == ordered[:-1]
    return torch.where(repeat, num_ids, ordered).sort().values


def _giving_order(unique: Tensor, id_of: Tensor, keys: Tensor) -> Tensor:
    num_ids = keys.numel() - 1
    empty = id_of == num_ids
    needed = torch.zeros_like(keys, dtype=torch.bool).scatter_(0, unique, True)[id_of.long()]
    rank = torch.where(empty, 0, torch.where(needed, 2, 1))
    order = id_of.argsort(stable=True)
    key = torch.where(empty, 0, keys[id_of.long()])
    order = order[key[order].argsort(stable=True)]
    return order[rank[order].argsort(stable=True)]


def _compact(values: Tensor, kept: Tensor, rank: Tensor) -> Tensor:
    num = values.numel()
    out = torch.full((num + 1,), NO_COPY, dtype=torch.int32, device=values.device)
    out.scatter_(0, torch.where(kept, rank, num), values.int())
    return out[:num]


@triton.jit(do_not_specialize=["num", "base", "num_ids", "num_slots"])
def _admit_kernel(
    ids_ptr: tl.tensor, slot_of_ptr: tl.tensor, id_of_ptr: tl.tensor, keys_ptr: tl.tensor,
    clock_ptr: tl.tensor, unique_ptr: tl.tensor, copy_expert_ptr: tl.tensor,
    copy_slot_ptr: tl.tensor, counts_ptr: tl.tensor, scratch_ptr: tl.tensor,
    totals_ptr: tl.tensor, num: tl.tensor,
    base: tl.tensor, num_ids: tl.tensor, num_slots: tl.tensor, N_PAD: tl.constexpr,
    LANES: tl.constexpr, COLS: tl.constexpr,
) -> None:  # fmt: skip
    item = tl.arange(0, N_PAD)
    inside = item < num
    expert = tl.load(ids_ptr + item, mask=inside, other=0).to(tl.int32)
    # Lanes past the end count as repeats of the first id.
    expert = tl.where(inside, expert, tl.load(ids_ptr).to(tl.int32))
    wanted = base + expert
    earlier = (wanted[None, :] == wanted[:, None]) & (item[None, :] < item[:, None])
    first = tl.sum(earlier.to(tl.int32), axis=1) == 0
    resident = tl.load(slot_of_ptr + wanted) >= 0
    missing = first & ~resident
    # One word carries both counts: distinct ids in the low half, missing ones in the high half.
    word = first.to(tl.int32) + (missing.to(tl.int32) << 16)
    ahead = tl.where(wanted[None, :] < wanted[:, None], word[None, :], 0)
    ranks = tl.sum(ahead, axis=1)
    rank = ranks & 0xFFFF
    miss_rank = ranks >> 16
    words = tl.sum(word)
    distinct = words & 0xFFFF
    misses = words >> 16

    tl.store(unique_ptr + rank, wanted.to(tl.int64), mask=first)
    tl.store(unique_ptr + item, num_ids.to(tl.int64), mask=inside & (item >= distinct))
    tl.store(copy_expert_ptr + miss_rank, expert, mask=missing)
    tl.store(copy_expert_ptr + item, -1, mask=inside & (item >= misses))
    tl.store(copy_slot_ptr + item, -1, mask=inside & (item >= misses))
    tl.store(counts_ptr, distinct)
    tl.store(counts_ptr + 1, distinct - misses)
    tl.store(counts_ptr + 2, misses)
    evictions = 0
    if misses > 0:
        key, tie = bound(id_of_ptr, keys_ptr, num_ids, num_slots, distinct, LANES, COLS)
        found = collect(
            scratch_ptr, id_of_ptr, keys_ptr, num_ids, num_slots, key, tie, LANES, LANES * COLS
        )
        if found > LANES:
            tl.debug_barrier()
            found = extract(
                scratch_ptr, id_of_ptr, keys_ptr, num_ids, num_slots, distinct, LANES * COLS
            )
        tl.debug_barrier()
        lane = tl.arange(0, LANES)
        slot = tl.load(scratch_ptr + lane, mask=lane < found, other=num_slots)
        key, tie = giving_rank(slot, id_of_ptr, keys_ptr, num_ids, num_slots)
        needed = tl.sum((tie[:, None] == wanted[None, :]).to(tl.int32), axis=1) > 0
        free = (lane < found) & ~needed
        lower = before(key[None, :], tie[None, :], key[:, None], tie[:, None])
        place = tl.sum((lower & free[None, :]).to(tl.int32), axis=1)
        taken = free & (place < misses)
        match = taken[None, :] & (place[None, :] == miss_rank[:, None])
        target = tl.sum(tl.where(match, slot[None, :], 0), axis=1)
        evicted = taken & (tie >= 0)
        evictions = tl.sum(evicted.to(tl.int32))
        # All reads of the maps and keys come before any write to them.
        tl.debug_barrier()
        tl.store(slot_of_ptr + tie, -1, mask=evicted)
        tl.store(slot_of_ptr + wanted, target, mask=missing)
        tl.store(id_of_ptr + target, wanted, mask=missing)
        tl.store(copy_slot_ptr + miss_rank, target, mask=missing)
    tl.store(counts_ptr + 3, evictions)
    if totals_ptr is not None:
        tl.store(totals_ptr, tl.load(totals_ptr) + distinct)
        tl.store(totals_ptr + 1, tl.load(totals_ptr + 1) + distinct - misses)
        tl.store(totals_ptr + 2, tl.load(totals_ptr + 2) + misses)
        tl.store(totals_ptr + 3, tl.load(totals_ptr + 3) + evictions)
    if clock_ptr is not None:
        tl.debug_barrier()
        tl.store(keys_ptr + wanted, tl.load(clock_ptr), mask=first)


def launch_admit(
    ids: Tensor,
    layer: int,
    num_experts: int,
    slot_of: Tensor,
    id_of: Tensor,
    keys: Tensor,
    clock: Tensor | None = None,
    num_warps: int | None = None,
    totals: Tensor | None = None,
) -> Admission:
    """Triton form of `admit`, one launch of one program; at most MAX_IDS ids.

    totals int64 [4], where given, grows by the counts.
    """
    num = ids.numel()
    assert 0 < num <= MAX_IDS, f"{num} ids, at most {MAX_IDS} fit one step"
    out = Admission(
        torch.empty_like(ids, dtype=torch.int64),
        torch.empty_like(ids, dtype=torch.int32),
        torch.empty_like(ids, dtype=torch.int32),
        ids.new_empty(4, dtype=torch.int32),
    )
    padded = max(8, triton.next_power_of_2(num))
    lanes = min(4 * padded, 2 * MAX_IDS)
    scan = min(_SLOTS_PER_SCAN, max(lanes, triton.next_power_of_2(id_of.numel())))
    _admit_kernel[(1,)](
        ids, slot_of, id_of, keys, clock, *out, ids.new_empty(lanes, dtype=torch.int32),
        totals, num, layer * num_experts, slot_of.numel() - 1, id_of.numel(),
        N_PAD=padded, LANES=lanes, COLS=scan // lanes,
        num_warps=num_warps or (16 if padded > 16 else 8),
    )  # fmt: skip
    return out
