"""Belady's bound: the expert whose next use lies furthest ahead goes first.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966. An expert of the visit in flight is never evicted. With bypass, after each visit
the pool keeps those that are wanted soonest, of its residents and the visit's experts: a missing
one that is wanted later than all of them is read once and does not enter.
"""

from __future__ import annotations

import numpy as np

from residency.runtime.replay.heap import ABSENT, PENDING, lowest, pop
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import (
    EVICTIONS,
    HITS,
    LOOKUPS,
    MISSES,
    Pool,
    Walk,
    enter,
    touched,
)
from residency.runtime.replay.visits import IGNORED, PASSES, Visits
from residency.runtime.traces.trace import Array


def belady(
    visits: Visits, num_slots: int, *, bypass: bool = False, layers: tuple[int, int] | None = None
) -> Array:
    """int64 [phases, L, 4] lookups, hits, misses and evictions of a pool that knows the future."""
    space = visits.space
    pool = Pool.empty(space.num_layers, space.num_ids, num_slots)
    run = _run_bypassing if bypass else run_belady
    keys = np.zeros(space.num_ids + 1, dtype=np.int64)
    run(Walk.of(visits, layers), pool, visits.next_visits, keys)
    return pool.counts


@jit
def run_belady(walk: Walk, pool: Pool, ahead: Array, keys: Array) -> None:
    """Replay all visits. ahead: the next visit of each id. keys: int64 [num_ids + 1], zeros."""
    for step in range(len(walk.clock_S)):
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if walk.ways[i] != IGNORED:
                    keys[walk.ids[i]] = -ahead[i]
                    touched(pool, keys, walk.ids[i])


@jit
def _run_bypassing(walk: Walk, pool: Pool, ahead: Array, keys: Array) -> None:
    """After each visit, the pool holds of its residents and the visit's experts those
    that are wanted soonest, those that pass by apart.
    """
    for step in range(len(walk.clock_S)):
        for layer in range(walk.layers[0], walk.layers[1]):
            visit = step * walk.num_layers[0] + layer
            counts = pool.counts[walk.phase_S[step], layer]
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                own = walk.ids[i]
                keys[own] = -ahead[i]
                touched(pool, keys, own)
                counts[LOOKUPS] += 1
                pool.marks[own] = visit + 1 if pool.place[own] == ABSENT else 0
                counts[HITS] += pool.place[own] != ABSENT
                counts[MISSES] += pool.place[own] == ABSENT
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if walk.ways[i] < PASSES and pool.marks[walk.ids[i]] == visit + 1:
                    counts[EVICTIONS] += _enter_if_sooner(pool, keys, walk.ids[i], visit + 1)


@jit
def _enter_if_sooner(pool: Pool, keys: Array, own: int, mark: int) -> int:
    """Admit an id if there is room, or over one that is wanted later: 1 where one had to go that
    was there before the visit.
    """
    evicted = 0
    if pool.size[0] == len(pool.heap):
        last = lowest(pool.heap, pool.place, pool.known, keys, pool.size[0])
        if keys[last] >= keys[own]:
            return 0
        pop(pool.heap, pool.place, pool.known, pool.size[0])
        pool.size[0] -= 1
        evicted = int(pool.marks[last] != mark)
    pool.place[own] = PENDING
    touched(pool, keys, own)
    return evicted


def static(visits: Visits, num_slots: int, layers: tuple[int, int] | None = None) -> Array:
    """The same counts of the `num_slots` experts that are wanted most, in their slots throughout:
    the best of all choices that never change.
    """
    space, shape = visits.space, (visits.num_steps, visits.space.num_layers)
    first, end = layers or (0, space.num_layers)
    wanted = np.bincount(visits.ids, minlength=space.num_ids)
    wanted[: first * space.num_experts] = -1
    wanted[end * space.num_experts :] = -1
    kept = np.zeros(space.num_ids, dtype=bool)
    kept[np.argsort(-wanted, kind="stable")[:num_slots]] = True
    sums = np.concatenate([[0], np.cumsum(kept[visits.ids])])
    hits_SL = np.diff(sums[visits.offsets]).reshape(shape)
    lookups_SL = np.diff(visits.offsets).reshape(shape)
    counts = Pool.empty(space.num_layers, space.num_ids, num_slots).counts
    for phase in range(len(counts)):
        own = visits.phase_S == phase
        counts[phase, first:end, LOOKUPS] = lookups_SL[own].sum(axis=0)[first:end]
        counts[phase, first:end, HITS] = hits_SL[own].sum(axis=0)[first:end]
    counts[..., MISSES] = counts[..., LOOKUPS] - counts[..., HITS]
    return counts
