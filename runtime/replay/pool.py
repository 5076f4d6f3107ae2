"""A pool without slots: which ids are resident, and what each visit does to them.

What runtime/admission.py defines, as loops: hits are counted before admission, the visit's own
residents stay, the lowest (key, id) goes first. Which slot an expert lies in decides nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from residency.runtime.counters import FIELDS, PHASES
from residency.runtime.replay.heap import ABSENT, PENDING, lowest, pop, push, reorder, rise
from residency.runtime.replay.jit import jit
from residency.runtime.replay.visits import FIRST, PASSES, Visits
from residency.runtime.traces.trace import Array

LOOKUPS, HITS, MISSES, EVICTIONS = map(FIELDS.index, ("lookups", "hits", "misses", "evictions"))
NUM_COUNTS = 4


class Walk(NamedTuple):
    """The visits as the loops take them: see `Visits`. layers: int64 [2], the first and the end of
    the layers that are walked; num_layers: int64 [1], of all.
    """

    ids: Array
    offsets: Array
    ways: Array
    clock_S: Array
    phase_S: Array
    layers: Array
    num_layers: Array

    @classmethod
    def of(cls, visits: Visits, layers: tuple[int, int] | None = None) -> Walk:
        num_layers = visits.space.num_layers
        first, end = layers or (0, num_layers)
        return cls(
            visits.ids,
            visits.offsets,
            visits.ways,
            visits.clock_S,
            visits.phase_S,
            np.array([first, end], dtype=np.int64),
            np.array([num_layers], dtype=np.int64),
        )


class Pool(NamedTuple):
    """heap, place, known: see `heap`. size: int64 [1], ids in the heap. marks: int64 [num_ids], the
    last visit in which each id was a hit, plus one; negative where it is protected no longer.
    aside: int32 [num_ids], room for ids. counts: int64 [phases, L, 4], lookups, hits, misses and
    evictions.
    """

    heap: Array
    place: Array
    known: Array
    size: Array
    marks: Array
    aside: Array
    counts: Array

    @classmethod
    def empty(cls, num_layers: int, num_ids: int, num_slots: int) -> Pool:
        return cls(
            np.zeros(num_slots, dtype=np.int32),
            np.full(num_ids, ABSENT, dtype=np.int32),
            np.zeros(num_ids, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
            np.zeros(num_ids, dtype=np.int64),
            np.zeros(num_ids, dtype=np.int32),
            np.zeros((len(PHASES), num_layers, NUM_COUNTS), dtype=np.int64),
        )


@jit
def begin(pool: Pool, keys: Array) -> None:
    """Before a range of steps: keys may have changed since the last."""
    reorder(pool.heap, pool.place, pool.known, keys, pool.size[0])


@jit
def touched(pool: Pool, keys: Array, own: int) -> None:
    """An id has a new key: put it where it belongs, if it is resident."""
    at = pool.place[own]
    if at >= 0:
        if keys[own] < pool.known[own]:
            pool.known[own] = keys[own]
            rise(pool.heap, pool.place, pool.known, at)
    elif at == PENDING:
        _push(pool, keys, own)


@jit
def enter(walk: Walk, pool: Pool, keys: Array, step: int, layer: int) -> None:
    """Count one visit and admit what it misses and may enter; keys as before its touch.

    What was admitted is PENDING until `touched`. A chunk with more experts than slots is worked
    off in waves, its residents first, then those that landed.
    """
    visit = step * walk.num_layers[0] + layer
    first, end = walk.offsets[visit], walk.offsets[visit + 1]
    counts = pool.counts[walk.phase_S[step], layer]
    hits = entering = 0
    for i in range(first, end):
        own = walk.ids[i]
        if pool.place[own] != ABSENT:
            hits += 1
            pool.marks[own] = visit + 1
        elif walk.ways[i] < PASSES:
            entering += 1
    misses = end - first - hits
    counts[LOOKUPS] += end - first
    counts[HITS] += hits
    counts[MISSES] += misses
    if entering == 0:
        return
    at, way = first, FIRST
    wave = min(len(pool.heap) - hits, entering)  # the residents are a part of the first
    while True:
        counts[EVICTIONS] += _evict(pool, keys, wave, visit + 1)
        entering -= wave
        while wave > 0:
            if at == end:
                at, way = first, way + 1
            own = walk.ids[at]
            if walk.ways[at] == way and abs(pool.marks[own]) != visit + 1:
                pool.place[own] = PENDING
                wave -= 1
            at += 1
        if entering == 0:
            return
        # The next wave may evict what this one needed.
        for i in range(first, end):
            own = walk.ids[i]
            if pool.marks[own] == visit + 1:
                pool.marks[own] = -visit - 1
            if pool.place[own] == PENDING:
                _push(pool, keys, own)
        wave = min(len(pool.heap), entering)


@jit
def _push(pool: Pool, keys: Array, own: int) -> None:
    pool.known[own] = keys[own]
    push(pool.heap, pool.place, pool.known, pool.size[0], own)
    pool.size[0] += 1


@jit
def _evict(pool: Pool, keys: Array, wanted: int, mark: int) -> int:
    """Make room for `wanted` ids; how many had to go. None with this mark does."""
    excess = wanted - (len(pool.heap) - pool.size[0])
    evicted = stayed = 0
    while evicted < excess:
        own = lowest(pool.heap, pool.place, pool.known, keys, pool.size[0])
        pop(pool.heap, pool.place, pool.known, pool.size[0])
        pool.size[0] -= 1
        if pool.marks[own] == mark:
            pool.aside[stayed] = own
            stayed += 1
        else:
            evicted += 1
    for i in range(stayed):
        _push(pool, keys, pool.aside[i])
    return evicted
