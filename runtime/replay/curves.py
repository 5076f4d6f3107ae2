"""Miss-ratio curves: policies and bounds over one trace, at many pool sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from residency.policies.cache import CachePolicy
from residency.policies.step import IdSpace
from residency.runtime.counters import PHASES
from residency.runtime.policy_probe import probe
from residency.runtime.replay.belady import belady, static
from residency.runtime.replay.compiled import has_form
from residency.runtime.replay.jit import COMPILES, MEND
from residency.runtime.replay.pool import HITS, LOOKUPS, NUM_COUNTS, Pool
from residency.runtime.replay.simulate import check_slots, compiles, simulate, sized
from residency.runtime.replay.visits import DECODE, Visits
from residency.runtime.traces.trace import Array, Trace

WORKERS = 2
PER_LAYER = "per layer"
BOUND = "bound"
TARGET = "decode=gpu"
COUNT_NAMES = ("lookups", "hits", "misses", "evictions")
Told = Callable[[str], None]


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
    cycle: int
    policies: list[Curve]
    bounds: list[Curve]
    seconds: float
    notes: list[str]


def draw_curves(
    trace: Trace,
    candidates: Sequence[Candidate],
    sizes: Sequence[int],
    told: Told | None = None,
) -> Curves:
    """Replay `trace` under each candidate at each size. told: hears of each replay that ended.

    Raises ConfigError for a pool that a decode step does not fit into, PolicyError for a policy
    that breaks its contract.
    """
    start, visits, space = time.perf_counter(), Visits.of(trace), trace.space
    for candidate in candidates:
        probe(candidate.policy, space)
    _ = visits.next_visits  # once, before several workers ask for it
    jobs: Jobs = {}
    for candidate in candidates:
        form = _form(visits, candidate.policy, sizes)
        for size in sizes:
            jobs[form, candidate.name, size] = _simulated(visits, candidate.policy, size)
    for num_shares in sorted({each.policy.num_shares(space) for each in candidates}):
        for name, replay in BOUNDS.items():
            whole = name if num_shares == 1 else f"{name} {PER_LAYER}"
            for size in sizes:
                jobs[BOUND, whole, size] = _bound(visits, size, num_shares, replay)
    counts = _run(jobs, told or (lambda line: None))
    curves = [
        Curve(name, form, [Point(size, counts[form, name, size]) for size in sizes])
        for form, name in dict.fromkeys((form, name) for form, name, _ in jobs)
    ]
    cycle = space.num_layers * min(space.top_k * trace.batch, space.num_experts)
    wanted = any(has_form(candidate.policy) for candidate in candidates)
    return Curves(
        space,
        cycle,
        [curve for curve in curves if curve.form != BOUND],
        [curve for curve in curves if curve.form == BOUND],
        time.perf_counter() - start,
        [
            *([MEND] if wanted and not COMPILES else []),
            *_warnings(visits, candidates, sizes, cycle),
            *_other_targets(trace),
        ],
    )


Jobs = dict[tuple[str, str, int], Callable[[], Array]]  # of a form, a name, a size
Replay = Callable[[Visits, int, tuple[int, int] | None], Array]
BOUNDS: dict[str, Replay] = {
    "belady": lambda visits, slots, layers: belady(visits, slots, layers=layers),
    "belady with bypass": lambda visits, slots, layers: belady(
        visits, slots, bypass=True, layers=layers
    ),
    "static": static,
}


def _form(visits: Visits, policy: CachePolicy, sizes: Sequence[int]) -> str:
    """Raises ConfigError for a pool that a decode step does not fit into."""
    found = True
    for size in sizes:
        own = sized(policy, size)
        check_slots(visits, own, size)
        found = found and compiles(visits.under(own), own, size)
    return "compiled" if found else "tensor"


def _simulated(visits: Visits, policy: CachePolicy, size: int) -> Callable[[], Array]:
    return lambda: simulate(visits, policy, size)


def _bound(visits: Visits, size: int, num_shares: int, replay: Replay) -> Callable[[], Array]:
    def run() -> Array:
        if num_shares == 1:
            return replay(visits, size, None)
        total = Pool.empty(visits.space.num_layers, visits.space.num_ids, 0).counts
        for layer in range(num_shares):
            total += replay(visits, size // num_shares, (layer, layer + 1))
        return total

    return run


def _run(jobs: Jobs, told: Told) -> dict[Any, Array]:
    """Loops without the lock run side by side; the tensor form takes its turns."""
    with ThreadPoolExecutor(WORKERS) as workers:
        futures = {key: workers.submit(job) for key, job in jobs.items()}
        try:
            found = {}
            for key, future in futures.items():
                found[key] = future.result()
                told(f"{key[1]}, {key[2]} slots")
            return found
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def _other_targets(trace: Trace) -> list[str]:
    words = str(trace.about.get("combination", TARGET)).split()
    if TARGET in words:
        return []
    return [f"recorded with {words[-1]}; replayed as {TARGET}, which fetches every miss"]


def _warnings(
    visits: Visits, candidates: Sequence[Candidate], sizes: Sequence[int], cycle: int
) -> list[str]:
    decodes = int(visits.phase_S.max(initial=0)) == DECODE
    some_global = any(each.policy.num_shares(visits.space) == 1 for each in candidates)
    if not some_global or not decodes or min(sizes) >= cycle:
        return []
    return [
        f"slots={min(sizes)} is below the token cycle of {cycle}: a global LRU lets an expert go "
        "for others of one token before it is wanted again"
    ]


def _named(counts: Array) -> dict[str, int]:
    assert len(counts) == NUM_COUNTS, "counts come in the order of COUNT_NAMES"
    return dict(zip(COUNT_NAMES, map(int, np.asarray(counts)), strict=True))
