"""The compiled form of lfu."""

from __future__ import annotations

import numpy as np

from residency.policies.cache.lfu import MAX_COUNT, MAX_SHIFT, TOKEN_BITS, Lfu
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.replay.visits import IGNORED, Visits
from residency.runtime.traces.trace import Array

TIME_MASK = (1 << TOKEN_BITS) - 1


def arrays_of(policy: Lfu, visits: Visits, num_slots: int) -> tuple[Array, Array]:
    """Its keys, shared with the policy; [half life]."""
    return policy.keys.numpy(), np.array([policy.config.half_life], dtype=np.int64)


@jit
def run(walk: Walk, pool: Pool, first: int, end: int, keys: Array, half_life: Array) -> None:
    begin(pool, keys)
    age = 0
    for step in range(first, end):
        token = walk.clock_S[step]
        if half_life[0] > 0 and token // half_life[0] > age:
            halvings = min(token // half_life[0] - age, MAX_SHIFT)
            age = token // half_life[0]
            for own in range(len(pool.place)):
                count = (keys[own] >> TOKEN_BITS) >> halvings
                keys[own] = (count << TOKEN_BITS) | (keys[own] & TIME_MASK)
            begin(pool, keys)
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if walk.ways[i] != IGNORED:
                    own = walk.ids[i]
                    count = min((keys[own] >> TOKEN_BITS) + 1, MAX_COUNT)
                    keys[own] = (count << TOKEN_BITS) | token
                    touched(pool, keys, own)
