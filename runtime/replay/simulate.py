"""Simulation: one policy and one pool over a trace, by the rules of the live run.

The tensor form is the runtime's own pool under the policy object; the compiled form does the same
in loops. Both rebase the policy where the live run would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch

from residency.policies.cache import CachePolicy
from residency.policies.errors import ConfigError
from residency.policies.step import Step
from residency.runtime.counters import EVICTIONS, PHASES
from residency.runtime.replay.compiled import form_of
from residency.runtime.replay.pool import NUM_COUNTS, Pool, Walk
from residency.runtime.replay.visits import DECODE, Visits
from residency.runtime.slots import SlotPool
from residency.runtime.traces.trace import Array

CPU = torch.device("cpu")


def simulate(
    visits: Visits,
    policy: CachePolicy,
    num_slots: int,
    *,
    layers: tuple[int, int] | None = None,
    compiled: bool = True,
) -> Array:
    """int64 [phases, L, 4] lookups, hits, misses and evictions, as the live counters count them.

    The policy starts anew; a copy of it is worked on. layers: first and end of those that share
    the pool, None for all. compiled: take that form where there is one.
    """
    check_slots(visits, num_slots)
    own = copy.copy(policy)
    own.allocate(visits.space, CPU)
    run = form_of(own) if compiled else None
    if run is None:
        return _by_tensors(visits, own, num_slots, layers)
    pool = Pool.empty(visits.space.num_layers, visits.space.num_ids, num_slots)
    clocks = visits.clock_S.copy()
    walk = Walk.of(visits, layers)._replace(clock_S=clocks)
    for first, end in _between_rebases(visits, own, clocks):
        run(walk, pool, first, end)
    return pool.counts


def check_slots(visits: Visits, num_slots: int) -> None:
    """Raises ConfigError for a pool that a decode step does not fit into."""
    if 0 < num_slots < visits.widest_decode:
        raise ConfigError(
            f"slots={num_slots}: a decode step of this trace needs {visits.widest_decode} experts "
            f"of one layer; mend it with slots={visits.widest_decode}"
        )


def _between_rebases(
    visits: Visits, policy: CachePolicy, clocks: Array
) -> Iterator[tuple[int, int]]:
    """Ranges of steps; between them the policy and the clocks ahead are shifted into the past."""
    start, half = 0, (policy.horizon or 0) // 2
    if policy.horizon is not None:
        while (beyond := np.flatnonzero(clocks[start:] + 1 >= policy.horizon)).size:
            end = start + int(beyond[0])
            if end > start:
                yield start, end
            policy.rebase(half)
            clocks[end:] -= half
            start = end
    yield start, len(clocks)


def _by_tensors(
    visits: Visits, policy: CachePolicy, num_slots: int, layers: tuple[int, int] | None
) -> Array:
    space = visits.space
    first_layer, end_layer = layers or (0, space.num_layers)
    pool = SlotPool(space, num_slots, policy, CPU)
    counts = torch.zeros(len(PHASES), space.num_layers, NUM_COUNTS, dtype=torch.int64)
    ids, clocks = torch.from_numpy(visits.ids.astype(np.int64)), visits.clock_S.copy()
    for start, end in _between_rebases(visits, policy, clocks):
        for s in range(start, end):
            phase, token = int(visits.phase_S[s]), torch.tensor(int(clocks[s]))
            policy.refresh(Step(token, 0, PHASES[phase]))
            for layer in range(first_layer, end_layer):
                visit = s * space.num_layers + layer
                unique = ids[int(visits.offsets[visit]) : int(visits.offsets[visit + 1])]
                step = Step(token, layer, PHASES[phase])
                counts[phase, layer] += _visit(pool, unique, step, bool(visits.admits_S[s]))
    return counts.numpy()


def _visit(pool: SlotPool, unique: torch.Tensor, step: Step, admits: bool) -> torch.Tensor:
    """One visit as the two executors make it: int64 [4] of what it counts."""
    first = step.layer * pool.space.num_experts
    if step.phase is PHASES[DECODE]:
        counts = pool.admit(unique - first, step).counts[:NUM_COUNTS]
    else:
        hit = pool.slot_of[unique] >= 0
        hits = hit.sum()
        counts = torch.stack([torch.tensor(len(unique)), hits, len(unique) - hits, hits * 0])
        if admits and not hit.all():
            waves = torch.cat([unique[hit], unique[~hit]]).split(max(1, pool.num_slots))
            for wave in waves:
                counts[EVICTIONS] += pool.admit(wave - first, step).counts[EVICTIONS]
    pool.touch(unique, step)
    return counts
