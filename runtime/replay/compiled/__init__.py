"""Compiled forms of built-in cache policies: the loop over all visits, the touch within it.

Each equals the policy's tensor form, on the policy's own tensors; a test holds them together. A
policy without an entry here, a plugin's for instance, is replayed in its tensor form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from residency.policies.cache import CachePolicy
from residency.policies.cache.belady import Belady
from residency.policies.cache.fifo import Fifo
from residency.policies.cache.lfu import Lfu
from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.cache.static import Static
from residency.policies.cache.succession import Succession
from residency.runtime.replay.compiled import belady, fifo, lfu, lrfu, lru, static, succession
from residency.runtime.replay.jit import COMPILES
from residency.runtime.replay.pool import Pool, Walk
from residency.runtime.replay.visits import Visits

# Each module has arrays_of(policy, visits, slots of a pool), None where its loop cannot do that,
# and run(walk, pool, first step, end, *arrays).
_COMPILED: dict[type[CachePolicy], Any] = {
    Belady: belady,
    Fifo: fifo,
    Lfu: lfu,
    Lrfu: lrfu,
    Lru: lru,
    Static: static,
    Succession: succession,
}


def form_of(
    policy: CachePolicy, visits: Visits, num_slots: int
) -> Callable[[Walk, Pool, int, int], None] | None:
    """Replays a range of steps on an allocated policy; None where there is no compiled form."""
    module = _COMPILED.get(type(policy))
    if module is None or not COMPILES:
        return None
    arrays = module.arrays_of(policy, visits, num_slots)
    if arrays is None:
        return None
    return lambda walk, pool, first, end: module.run(walk, pool, first, end, *arrays)


def has_form(policy: CachePolicy) -> bool:
    """Whether a compiled form is written for it, installed or not."""
    return type(policy) in _COMPILED
