"""The compiled form of static."""

from __future__ import annotations

import numpy as np

from residency.policies.cache.static import Static
from residency.runtime.replay.heap import PENDING
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.replay.visits import PASSES, Visits
from residency.runtime.traces.trace import Array


def arrays_of(policy: Static, visits: Visits, num_slots: int) -> tuple[Array, Array]:
    """Its keys, shared with the policy; bool [num_ids + 1], who is pinned."""
    return policy.keys.numpy(), policy.pinned.numpy()


def run(walk: Walk, pool: Pool, first: int, end: int, keys: Array, pinned: Array) -> None:
    others_pass = np.where(pinned[walk.ids], walk.ways, np.maximum(walk.ways, PASSES))
    _run(walk._replace(ways=others_pass.astype(walk.ways.dtype)), pool, first, end, keys)


@jit
def _run(walk: Walk, pool: Pool, first: int, end: int, keys: Array) -> None:
    begin(pool, keys)
    for step in range(first, end):
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if pool.place[walk.ids[i]] == PENDING:
                    touched(pool, keys, walk.ids[i])
