"""The compiled form of belady: the loop of the bound."""

from __future__ import annotations

from residency.policies.cache.belady import Belady
from residency.runtime.replay.belady import run_belady
from residency.runtime.replay.pool import Pool, Walk
from residency.runtime.replay.visits import Visits
from residency.runtime.traces.trace import Array


def arrays_of(policy: Belady, visits: Visits, num_slots: int) -> tuple[Array, Array]:
    """Its keys, shared with the policy; the next visit of each id of each visit."""
    return policy.keys.numpy(), visits.next_visits


def run(walk: Walk, pool: Pool, first: int, end: int, keys: Array, ahead: Array) -> None:
    assert (first, end) == (0, len(walk.clock_S)), "belady has no horizon, so there is one range"
    run_belady(walk, pool, ahead, keys)
