"""The compiled form of lru: a list from the least to the most recently used.

A visit's ids share their time, so they follow one another by id. Where a chunk needs more experts
than there are slots, its later waves choose among its earlier ones, and where some are no
references they keep their places: then a heap does what it does for other policies.
"""

from __future__ import annotations

import numpy as np

from residency.policies.cache.lru import Lru
from residency.runtime.replay.heap import ABSENT
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import (
    EVICTIONS,
    HITS,
    LOOKUPS,
    MISSES,
    Pool,
    Walk,
    begin,
    enter,
    touched,
)
from residency.runtime.replay.visits import IGNORED, PASSES, Visits
from residency.runtime.traces.trace import Array


def arrays_of(policy: Lru, visits: Visits, num_slots: int) -> tuple[Array, Array]:
    """Its keys, shared with the policy; [whether a heap is needed]."""
    by_heap = visits.widest_entering > num_slots or bool((visits.ways == IGNORED).any())
    return policy.keys.numpy(), np.array([by_heap])


def run(walk: Walk, pool: Pool, first: int, end: int, keys: Array, by_heap: Array) -> None:
    if by_heap[0]:
        _by_heap(walk, pool, first, end, keys)
        return
    assert (first, end) == (0, len(walk.clock_S)), "lru has no horizon, so there is one range"
    # The last entry stands for both ends: what follows it is used least recently.
    follows = np.full(len(pool.place) + 1, len(pool.place), dtype=np.int64)
    _by_list(walk, pool, follows, follows.copy())


@jit
def _by_list(walk: Walk, pool: Pool, follows: Array, precedes: Array) -> None:
    place, ids = pool.place, walk.ids
    ends = len(place)
    free = len(pool.heap)
    for step in range(len(walk.clock_S)):
        for layer in range(walk.layers[0], walk.layers[1]):
            visit = step * walk.num_layers[0] + layer
            first, end = walk.offsets[visit], walk.offsets[visit + 1]
            hits = entering = 0
            for i in range(first, end):
                own = ids[i]
                if place[own] == ABSENT:
                    entering += walk.ways[i] < PASSES
                else:
                    hits += 1
                    follows[precedes[own]] = follows[own]
                    precedes[follows[own]] = precedes[own]
            counts = pool.counts[walk.phase_S[step], layer]
            counts[LOOKUPS] += end - first
            counts[HITS] += hits
            counts[MISSES] += end - first - hits
            if entering > 0:
                while free < entering:
                    oldest = follows[ends]
                    follows[ends] = follows[oldest]
                    precedes[follows[oldest]] = ends
                    place[oldest] = ABSENT
                    free += 1
                    counts[EVICTIONS] += 1
                free -= entering
            for i in range(first, end):
                own = ids[i]
                if walk.ways[i] < PASSES or place[own] != ABSENT:
                    place[own] = 0
                    newest = precedes[ends]
                    follows[newest] = own
                    precedes[own] = newest
                    follows[own] = ends
                    precedes[ends] = own


@jit
def _by_heap(walk: Walk, pool: Pool, first: int, end: int, keys: Array) -> None:
    num_layers = walk.num_layers[0]
    begin(pool, keys)
    for step in range(first, end):
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * num_layers + layer
            now = walk.clock_S[step] * num_layers + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if walk.ways[i] != IGNORED:
                    keys[walk.ids[i]] = now
                    touched(pool, keys, walk.ids[i])
