"""Admission on the host, for chunks whose layers the host plans one by one.

What `admission.admit` does to the same maps, selecting before it sorts: a chunk asks for hundreds
of experts among thousands of slots, while the link waits for the answer.
"""

from __future__ import annotations

import numpy as np
import torch

from residency.runtime.admission import Admission

IntArray = np.ndarray
BoolArray = np.ndarray


def admit_on_host(
    unique: torch.Tensor,
    slot_of: torch.Tensor,
    id_of: torch.Tensor,
    keys: torch.Tensor,
    admitted: torch.Tensor | None,
    quota: torch.Tensor | None = None,
    slots: range | None = None,
) -> Admission:
    """As `admission.admit`, on CPU tensors, which it updates in place."""
    ids, slot_of_id, held = unique.numpy(), slot_of.numpy(), id_of.numpy()
    sink, num_slots = len(slot_of_id) - 1, len(held)
    slots = range(num_slots) if slots is None else slots
    held = held[slots.start : slots.stop]
    real = ids != sink
    rows = slot_of_id[ids].astype(np.int64)
    hit = real & (rows >= 0)
    missing = real & ~hit
    welcome = np.ones_like(missing) if admitted is None else admitted.numpy()
    fetched = missing
    if quota is not None:
        fetched = within_quota_on_host(missing, welcome, keys.numpy()[ids], quota.numpy())
    on_host = missing & ~fetched
    entering = fetched & welcome
    bypassed = fetched & ~entering
    rows[bypassed] = num_slots + np.arange(bypassed.sum())
    rows[on_host] = -1
    entered, evicted = np.where(entering, ids, sink), np.full_like(ids, sink)
    if num_entering := int(entering.sum()):
        target = first_to_go(ids[hit], num_entering, held, keys.numpy())
        evicted[entering] = held[target]
        held[target] = ids[entering]
        target += slots.start
        slot_of_id[evicted] = -1
        slot_of_id[ids[entering]] = target
        slot_of_id[sink] = -1
        rows[entering] = target
    counts = [int(mask.sum()) for mask in (real, hit, missing, evicted != sink, on_host)]
    masks = torch.from_numpy(fetched), torch.from_numpy(on_host)
    moves = torch.from_numpy(entered), torch.from_numpy(evicted)
    return Admission(unique, torch.from_numpy(rows), *masks, torch.tensor(counts), *moves)


def within_quota_on_host(
    missing: BoolArray, welcome: BoolArray, keys: IntArray, quota: IntArray
) -> BoolArray:
    """As `admission.within_quota`."""
    wanted = np.flatnonzero(missing)
    fetched = np.zeros_like(missing)
    order = np.lexsort((wanted, keys[wanted], welcome[wanted]))
    fetched[wanted[order[len(wanted) - quota[len(wanted)] :]]] = True
    return fetched


def first_to_go(needed: IntArray, count: int, held: IntArray, keys: IntArray) -> IntArray:
    """The first `count` slots to be taken: empty ones by index, then others by (key, id).

    needed: ids that stay. held: the id in each slot, the sink id where it is empty. Precondition:
    so many slots are free of needed ids.
    """
    sink = len(keys) - 1
    empty = np.flatnonzero(held == sink)[:count]
    if len(empty) == count:
        return empty
    stays = np.zeros(len(keys), dtype=bool)
    stays[needed] = True
    stays[sink] = True
    evictable = np.flatnonzero(~stays[held])
    wanted = count - len(empty)
    assert wanted <= len(evictable), f"{wanted} slots wanted, {len(evictable)} can be had"
    key = keys[held[evictable]]
    if wanted < len(evictable):
        # The last wanted key bounds the choice; all ties with it stay in until they are sorted.
        within = key <= np.partition(key, wanted - 1)[wanted - 1]
        evictable, key = evictable[within], key[within]
    order = np.lexsort((held[evictable], key))[:wanted]
    return np.concatenate([empty, evictable[order]])


def distinct_on_host(experts: IntArray, num_experts: int) -> IntArray:
    """Distinct ids within the layer, ascending: int64 [M]."""
    wanted = np.zeros(num_experts, dtype=bool)
    wanted[experts] = True
    return np.flatnonzero(wanted)
