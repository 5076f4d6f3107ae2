"""The compiled form of lrfu."""

from __future__ import annotations

import numpy as np

from residency.policies.cache.lrfu import DECAY_BITS, STEP_BITS, TOKEN_BITS, Lrfu
from residency.runtime.counters import PHASES
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.replay.visits import IGNORED, Visits
from residency.runtime.traces.trace import Array


def arrays_of(
    policy: Lrfu, visits: Visits, num_slots: int
) -> tuple[Array, Array, Array, Array] | None:
    """Keys, scores and gains, shared with the policy; [scaled decay, fraction bits, and the lead of
    each phase]. None where history is reset.
    """
    if policy.follows_moves:
        return None
    leads = [policy.lead(phase) for phase in PHASES]
    scale = np.array([policy.scaled_decay, policy.fraction_bits, *leads], dtype=np.int64)
    return policy.keys.numpy(), policy.scores.numpy(), policy.gains.numpy(), scale


@jit
def run(
    walk: Walk, pool: Pool, first: int, end: int, keys: Array, scores: Array, gains: Array,
    scale: Array,
) -> None:  # fmt: skip
    shift = scale[1] - STEP_BITS
    part = (1 << shift) - 1
    last_entry = len(gains) - 1
    begin(pool, keys)
    for step in range(first, end):
        token = walk.clock_S[step]
        now = ((token * scale[0]) >> (DECAY_BITS - scale[1])) + scale[2 + walk.phase_S[step]]
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if walk.ways[i] == IGNORED:
                    continue
                own = walk.ids[i]
                distance = abs(scores[own] - now)
                entry = min(distance >> shift, last_entry)
                score = max(scores[own], now) + gains[entry, 0]
                score -= (gains[entry, 1] * (distance & part)) >> shift
                scores[own] = score
                keys[own] = (score << TOKEN_BITS) | token
                touched(pool, keys, own)
