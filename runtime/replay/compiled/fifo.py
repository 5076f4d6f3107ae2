"""The compiled form of fifo."""

from __future__ import annotations

from residency.policies.cache.fifo import Fifo
from residency.runtime.replay.heap import PENDING
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.replay.visits import Visits
from residency.runtime.traces.trace import Array


def arrays_of(policy: Fifo, visits: Visits, num_slots: int) -> tuple[Array] | None:
    """Its keys, shared with the policy. None where a chunk enters in waves, each an admission."""
    return None if visits.widest_entering > num_slots else (policy.keys.numpy(),)


@jit
def run(walk: Walk, pool: Pool, first: int, end: int, keys: Array) -> None:
    begin(pool, keys)
    newest = 0  # there is no horizon, so there is one range
    for step in range(first, end):
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            entered = False
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                own = walk.ids[i]
                if pool.place[own] == PENDING:
                    entered = True
                    keys[own] = newest + 1
                    touched(pool, keys, own)
            newest += entered
