"""Simulation: one policy and one pool over a trace, by the rules of the live run.

The tensor form is the runtime's own pool under the policy object; the compiled form does the same
in loops. Both rebase the policy where the live run would.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from residency.policies.cache import CachePolicy
from residency.policies.errors import ConfigError
from residency.policies.step import Step
from residency.runtime.counters import EVICTIONS, PHASES
from residency.runtime.replay.compiled import form_of
from residency.runtime.replay.pool import NUM_COUNTS, Pool, Walk
from residency.runtime.replay.visits import DECODE, ENTERS, FIRST, IGNORED, Visits
from residency.runtime.slots import SlotPool
from residency.runtime.traces.trace import Array

CPU = torch.device("cpu")


@runtime_checkable
class Foreseeing(Protocol):
    """A policy that is told all references before they are made."""

    def foresee_steps(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """ids: int64 [R] global ids. tokens: int64 [R], the clock of the step that needs each."""


def simulate(
    visits: Visits, policy: CachePolicy, num_slots: int, *, compiled: bool = True
) -> Array:
    """int64 [phases, L, 4] lookups, hits, misses and evictions, as the live counters count them.

    The policy starts anew; one like it, of this size, is worked on. compiled: take that form where
    there is one. Raises ConfigError for slots that cannot be shared out, or are too few.
    """
    policy = sized(policy, num_slots)
    check_slots(visits, policy, num_slots)
    visits = visits.under(policy)
    num_shares = policy.num_shares(visits.space)
    if not (compiled and compiles(visits, policy, num_slots)):
        return _by_tensors(visits, _allocated(policy, visits), num_slots)
    counts = Pool.empty(visits.space.num_layers, visits.space.num_ids, 0).counts
    for layers in [(i, i + 1) for i in range(num_shares)] if num_shares > 1 else [None]:
        counts += _by_loops(visits, policy, num_slots // num_shares, layers)
    return counts


def sized(policy: CachePolicy, num_slots: int) -> CachePolicy:
    """The same policy with so many slots."""
    assert dataclasses.is_dataclass(policy.config), "a policy without slots is not replayed"
    return type(policy)(replace(policy.config, slots=num_slots))


def check_slots(visits: Visits, policy: CachePolicy, num_slots: int) -> None:
    """Raises ConfigError for a pool that is too small, or cannot be shared out."""
    num_shares = policy.num_shares(visits.space)
    if num_slots < (needed := visits.widest_decode * num_shares):
        raise ConfigError(
            f"slots={num_slots}: a decode step of this trace needs {visits.widest_decode} experts "
            f"of one layer{', and each layer has its own' if num_shares > 1 else ''}; mend it with "
            f"slots={needed}"
        )
    for fault in policy.shape_faults(visits.space):
        raise ConfigError(str(fault))


def compiles(visits: Visits, policy: CachePolicy, num_slots: int) -> bool:
    """Whether a compiled form replays these visits, as `Visits.under` the policy leaves them."""
    share = num_slots // policy.num_shares(visits.space)
    return form_of(_allocated(policy, visits), visits, share) is not None


def _allocated(policy: CachePolicy, visits: Visits) -> CachePolicy:
    own = copy.copy(policy)
    own.allocate(visits.space, CPU)
    return own


def _by_loops(
    visits: Visits, policy: CachePolicy, num_slots: int, layers: tuple[int, int] | None
) -> Array:
    """layers: first and end of those that share the pool, None for all."""
    own = _allocated(policy, visits)
    run = form_of(own, visits, num_slots)
    assert run is not None, "there is a compiled form"
    pool = Pool.empty(visits.space.num_layers, visits.space.num_ids, num_slots)
    clocks = visits.clock_S.copy()
    walk = Walk.of(visits, layers)._replace(clock_S=clocks)
    for first, end in _between_rebases(visits, own, clocks):
        run(walk, pool, first, end)
    return pool.counts


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


def _by_tensors(visits: Visits, policy: CachePolicy, num_slots: int) -> Array:
    space = visits.space
    pool = SlotPool(space, num_slots, policy, CPU)
    counts = torch.zeros(len(PHASES), space.num_layers, NUM_COUNTS, dtype=torch.int64)
    ids, ways = torch.from_numpy(visits.ids.astype(np.int64)), torch.from_numpy(visits.ways)
    clocks = visits.clock_S.copy()
    if isinstance(policy, Foreseeing):
        clock_of = np.repeat(clocks, np.diff(visits.offsets[:: space.num_layers]))
        policy.foresee_steps(ids, torch.from_numpy(clock_of))
    for start, end in _between_rebases(visits, policy, clocks):
        for s in range(start, end):
            phase, token = int(visits.phase_S[s]), torch.tensor(int(clocks[s]))
            pool.refresh(Step(token, 0, PHASES[phase]))
            for layer in range(space.num_layers):
                part = visits.part(s, layer)
                step = Step(token, layer, PHASES[phase])
                counts[phase, layer] += _visit(pool, ids[part], ways[part], step)
    return counts.numpy()


def _visit(pool: SlotPool, unique: torch.Tensor, ways: torch.Tensor, step: Step) -> torch.Tensor:
    """One visit as the two executors make it: int64 [4] of what it counts."""
    first = step.layer * pool.space.num_experts
    if step.phase is PHASES[DECODE]:
        counts = pool.admit(unique - first, step).counts[:NUM_COUNTS]
        pool.touch(unique, step)
        return counts
    hit = pool.slot_of[unique] >= 0
    hits = hit.sum()
    counts = torch.stack([torch.tensor(len(unique)), hits, len(unique) - hits, hits * 0])
    welcome = pool.welcomes(unique, step)
    entering = ~hit if welcome is None else ~hit & welcome
    landed, others = (unique[entering & (ways == way)] for way in (FIRST, ENTERS))
    if len(landed) + len(others):
        waves = torch.cat([unique[hit], landed, others]).split(max(1, pool.share_size))
        for wave in waves:
            counts[EVICTIONS] += pool.admit(wave - first, step).counts[EVICTIONS]
    if len(references := unique[ways != IGNORED]):
        pool.touch(references, step)
    return counts
