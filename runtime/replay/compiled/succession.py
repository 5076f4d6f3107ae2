"""The compiled form of succession."""

from __future__ import annotations

from typing import Any

import numpy as np

from residency.policies.cache.succession import BITS, MAX_AGE, ONE, WEIGHT_BITS, Succession
from residency.runtime.replay.jit import jit
from residency.runtime.replay.pool import Pool, Walk, begin, enter, touched
from residency.runtime.replay.visits import DECODE, IGNORED, Visits
from residency.runtime.traces.trace import Array


def arrays_of(policy: Succession, visits: Visits, num_slots: int) -> tuple[Array, ...]:
    """The policy's own tensors; its tables; [shift, weight of what follows, experts of a layer]."""
    state = (
        policy.keys,
        policy.evidence,
        policy.last,
        policy.merits,
        policy.costs,
        policy.faded,
        policy.followers,
        policy.sources,
    )
    numbers = [policy.shift, policy.weight_of_follow, visits.space.num_experts]
    return (
        *(tensor.numpy() for tensor in state),
        policy.decays.numpy(),
        policy.age_costs.numpy(),
        np.array(numbers, dtype=np.int64),
    )


@jit
def run(
    walk: Walk, pool: Pool, first: int, end: int, keys: Array, evidence: Array, last: Array,
    merits: Array, costs: Array, faded: Array, followers: Array, sources: Array, decays: Array,
    age_costs: Array, numbers: Array,
) -> None:  # fmt: skip
    num_experts = numbers[2]
    for step in range(first, end):
        token = walk.clock_S[step]
        for own in range(len(pool.place)):
            age = min(max(token - last[own], 1), MAX_AGE)
            costs[own] = age_costs[age]
            faded[own] = (evidence[own, 0] * decays[age]) >> BITS
            keys[own] = merits[own] - age_costs[age - 1]
        begin(pool, keys)
        for layer in range(walk.layers[0], walk.layers[1]):
            enter(walk, pool, keys, step, layer)
            visit = step * walk.num_layers[0] + layer
            references = 0
            for i in range(walk.offsets[visit], walk.offsets[visit + 1]):
                if walk.ways[i] != IGNORED:
                    own = walk.ids[i]
                    evidence[own, 0] = faded[own] + ONE
                    last[own] = token
                    costs[own] = 0
                    references += 1
            if references == 0:
                continue
            begins = layer * num_experts
            if walk.phase_S[step] == DECODE:
                _follow(evidence, costs, followers, sources, begins, num_experts, numbers[0])
            else:
                for own in range(begins, begins + num_experts):
                    sources[own] = 0
            for own in range(begins, begins + num_experts):
                merit = _log2(evidence[own, 0]) << WEIGHT_BITS
                merits[own] = merit + _log2(evidence[own, 1]) * numbers[1]
                keys[own] = merits[own] - costs[own]
                touched(pool, keys, own)


@jit
def _follow(
    evidence: Array, costs: Array, followers: Array, sources: Array, begins: int,
    num_experts: int, shift: int,
) -> None:  # fmt: skip
    gain = ONE >> shift
    for source in range(begins, begins + num_experts):
        if sources[source] == 1:
            for expert in range(num_experts):
                followers[source, expert] -= followers[source, expert] >> shift
                if costs[begins + expert] == 0:
                    followers[source, expert] += gain
    for own in range(begins, begins + num_experts):
        sources[own] = 1 if costs[own] == 0 else 0
        evidence[own, 1] = 0
    for source in range(begins, begins + num_experts):
        if sources[source] == 1:
            for expert in range(num_experts):
                evidence[begins + expert, 1] += followers[source, expert]


@jit
def _log2(number: int) -> Any:
    """The bits of a number above 0 as an fp32 number: log2 in fixed point, plus a constant."""
    return np.int64(np.float32(number).view(np.int32))
