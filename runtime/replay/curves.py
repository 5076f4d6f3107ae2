"""Miss-ratio curves: policies and bounds over one trace, at many pool sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from residency.policies.cache import CachePolicy
from residency.policies.step import IdSpace
from residency.runtime.counters import PHASES
from residency.runtime.replay.belady import belady, static
from residency.runtime.replay.compiled import has_form
from residency.runtime.replay.jit import COMPILES, MEND
from residency.runtime.replay.pool import HITS, LOOKUPS, NUM_COUNTS, Pool
from residency.runtime.replay.simulate import check_slots, simulate
from residency.runtime.replay.visits import DECODE, Visits
from residency.runtime.traces.trace import Array, Trace

WORKERS = 2
TARGET = "decode=gpu"
COUNT_NAMES = ("lookups", "hits", "misses", "evictions")
Told = Callable[[str], None]


class Scope(StrEnum):
    GLOBAL = "global"  # one pool for all layers
    LAYER = "layer"  # a pool for each layer, of equal size


@dataclass(frozen=True)
class Candidate:
    """A policy under a name that tells it from the others."""

    name: str
    policy: CachePolicy


@dataclass(frozen=True)
class Point:
    """What a pool of `slots` counted. counts: int64 [phases, L, 4] in the order of COUNT_NAMES."""

    slots: int
    counts: Array

    @property
    def miss_ratio(self) -> float:
        lookups = int(self.counts[..., LOOKUPS].sum())
        return 1 - int(self.counts[..., HITS].sum()) / lookups

    def as_dict(self) -> dict[str, Any]:
        phases = {str(phase): _named(self.counts[p].sum(axis=0)) for p, phase in enumerate(PHASES)}
        layers = [
            {"layer": layer, "phase": str(phase)} | _named(counts)
            for p, phase in enumerate(PHASES)
            for layer, counts in enumerate(self.counts[p])
            if counts[LOOKUPS]
        ]
        total = _named(self.counts.sum(axis=(0, 1)))
        ratio = {"slots": self.slots, "miss_ratio": self.miss_ratio}
        return ratio | total | {"phases": phases, "layers": layers}


@dataclass(frozen=True)
class Curve:
    """One policy or bound over the sizes. form: compiled, tensor, or bound."""

    name: str
    form: str
    points: list[Point]

    def as_dict(self) -> dict[str, Any]:
        points = [point.as_dict() for point in self.points]
        return {"name": self.name, "form": self.form, "points": points}


@dataclass(frozen=True)
class Curves:
    """The curves of one trace. cycle: slots below which a global LRU hits nothing in decode.

    seconds: wall clock of all replays.
    """

    space: IdSpace
    scope: Scope
    cycle: int
    policies: list[Curve]
    bounds: list[Curve]
    seconds: float
    notes: list[str]


def draw_curves(
    trace: Trace,
    candidates: Sequence[Candidate],
    sizes: Sequence[int],
    scope: Scope = Scope.GLOBAL,
    told: Told | None = None,
) -> Curves:
    """Replay `trace` under each candidate at each size. told: hears of each replay that ended.

    Raises ConfigError for a pool that a decode step does not fit into.
    """
    start, visits, space = time.perf_counter(), Visits.of(trace), trace.space
    _ = visits.next_visits  # once, before several workers ask for it
    for size in sizes:
        for _, slots in _pools(space, size, scope):
            check_slots(visits, slots)
    jobs: dict[tuple[str, int], Callable[[], Array]] = {}
    for candidate in candidates:
        for size in sizes:
            jobs[candidate.name, size] = _job(visits, size, scope, _simulated(candidate.policy))
    bounds: dict[str, Replay] = {
        "belady": lambda v, n, layers: belady(v, n, layers=layers),
        "belady with bypass": lambda v, n, layers: belady(v, n, bypass=True, layers=layers),
        "static": static,
    }
    for name, replay in bounds.items():
        for size in sizes:
            jobs[name, size] = _job(visits, size, scope, replay)
    counts = _run(jobs, told or (lambda line: None))
    curves = {
        name: Curve(name, form, [Point(size, counts[name, size]) for size in sizes])
        for name, form in [
            *((c.name, "compiled" if _compiles(c.policy) else "tensor") for c in candidates),
            *((name, "bound") for name in bounds),
        ]
    }
    cycle = space.num_layers * min(space.top_k * trace.batch, space.num_experts)
    wanted = any(has_form(candidate.policy) for candidate in candidates)
    return Curves(
        space,
        scope,
        cycle,
        [curves[candidate.name] for candidate in candidates],
        [curves[name] for name in bounds],
        time.perf_counter() - start,
        [
            *([MEND] if wanted and not COMPILES else []),
            *_warnings(sizes, cycle, scope, int(visits.phase_S.max(initial=0)) == DECODE),
            *_other_targets(trace),
        ],
    )


Replay = Callable[[Visits, int, tuple[int, int] | None], Array]


def _simulated(policy: CachePolicy) -> Replay:
    return lambda visits, slots, layers: simulate(visits, policy, slots, layers=layers)


def _compiles(policy: CachePolicy) -> bool:
    return COMPILES and has_form(policy)


def _job(visits: Visits, size: int, scope: Scope, replay: Replay) -> Callable[[], Array]:
    def run() -> Array:
        parts = (replay(visits, slots, layers) for layers, slots in _pools(space, size, scope))
        total = Pool.empty(space.num_layers, space.num_ids, 0).counts
        return sum(parts, start=total)

    space = visits.space
    return run


def _pools(space: IdSpace, size: int, scope: Scope) -> list[tuple[tuple[int, int] | None, int]]:
    """(layers, slots) of each pool; what does not divide goes to the first layers."""
    if scope is Scope.GLOBAL:
        return [(None, size)]
    each, rest = divmod(size, space.num_layers)
    return [((layer, layer + 1), each + (layer < rest)) for layer in range(space.num_layers)]


def _run(jobs: dict[tuple[str, int], Callable[[], Array]], told: Told) -> dict[Any, Array]:
    """Loops without the lock run side by side; the tensor form takes its turns."""
    with ThreadPoolExecutor(WORKERS) as workers:
        futures = {key: workers.submit(job) for key, job in jobs.items()}
        try:
            found = {}
            for (name, size), future in futures.items():
                found[name, size] = future.result()
                told(f"{name}, {size} slots")
            return found
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def _other_targets(trace: Trace) -> list[str]:
    words = str(trace.about.get("combination", TARGET)).split()
    if TARGET in words:
        return []
    return [f"recorded with {words[-1]}; replayed as {TARGET}, which fetches every miss"]


def _warnings(sizes: Sequence[int], cycle: int, scope: Scope, decodes: bool) -> list[str]:
    if scope is not Scope.GLOBAL or not decodes or min(sizes) >= cycle:
        return []
    return [
        f"slots={min(sizes)} is below the token cycle of {cycle}: a global LRU lets an expert go "
        "for others of one token before it is wanted again"
    ]


def _named(counts: Array) -> dict[str, int]:
    assert len(counts) == NUM_COUNTS, "counts come in the order of COUNT_NAMES"
    return dict(zip(COUNT_NAMES, map(int, np.asarray(counts)), strict=True))
