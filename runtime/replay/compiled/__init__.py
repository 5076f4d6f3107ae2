"""Compiled forms of built-in cache policies: the loop over all visits, the touch within it.

Each equals the policy's tensor form, on the policy's own tensors; a test holds them together. A
policy without an entry here, a plugin's for instance, is replayed in its tensor form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from residency.policies.cache import CachePolicy
from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.runtime.replay.compiled import lrfu, lru
from residency.runtime.replay.jit import COMPILES
from residency.runtime.replay.pool import Pool, Walk

# walk, pool, first step, end, and the policy's state as `arrays_of` gives it.
Form = Callable[..., None]
_COMPILED: dict[type[CachePolicy], Any] = {Lru: lru, Lrfu: lrfu}


def form_of(policy: CachePolicy) -> Callable[[Walk, Pool, int, int], None] | None:
    """Replays a range of steps on an allocated policy; None where there is no compiled form."""
    module = _COMPILED.get(type(policy))
    if module is None or not COMPILES:
        return None
    arrays = module.arrays_of(policy)
    return lambda walk, pool, first, end: module.run(walk, pool, first, end, *arrays)


def has_form(policy: CachePolicy) -> bool:
    """Whether a compiled form is written for it, installed or not."""
    return type(policy) in _COMPILED
