"""The compiled form of lrfu."""

from __future__ import annotations

import numpy as np

from residency.policies.cache.lrfu import DECAY_BITS, STEP_BITS, TOKEN_BITS, Lrfu
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.traces.trace import Array


def arrays_of(policy: Lrfu) -> tuple[Array, Array, Array, Array]:
    """Keys, scores and gains, shared with the policy; [scaled decay, fraction bits]."""
    scale = np.array([policy.scaled_decay, policy.fraction_bits], dtype=np.int64)
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
        now = (token * scale[0]) >> (DECAY_BITS - scale[1])
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                own = walk.ids[i]
                distance = abs(scores[own] - now)
                entry = min(distance >> shift, last_entry)
                score = max(scores[own], now) + gains[entry, 0]
                score -= (gains[entry, 1] * (distance & part)) >> shift
                scores[own] = score
                keys[own] = (score << TOKEN_BITS) | token
                touched(pool, keys, own)
