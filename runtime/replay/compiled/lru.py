"""The compiled form of lru."""

from __future__ import annotations

from residency.policies.cache.lru import Lru
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.traces.trace import Array


def arrays_of(policy: Lru) -> tuple[Array]:
    """Its keys, shared with the policy."""
    return (policy.keys.numpy(),)


@jit
def run(walk: Walk, pool: Pool, first: int, end: int, keys: Array) -> None:
    num_layers = walk.num_layers[0]
    begin(pool, keys)
    for step in range(first, end):
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * num_layers + layer
            now = walk.clock_S[step] * num_layers + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                own = walk.ids[i]
                keys[own] = now
                touched(pool, keys, own)
