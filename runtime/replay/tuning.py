"""Tuning: a policy's keys searched by replay on one part of a trace, judged on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from residency.policies.cache import CachePolicy
from residency.runtime.replay.curves import Told
from residency.runtime.replay.pool import HITS, LOOKUPS
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.visits import Visits
from residency.runtime.traces.trace import Trace

Choice = Mapping[str, str]  # of a value for each key
Make = Callable[[Choice], CachePolicy]


@dataclass(frozen=True)
class Tried:
    """One choice, and the hit rates that it had at each size."""

    choice: Choice
    hit_rates: list[float]

    @property
    def mean(self) -> float:
        return sum(self.hit_rates) / len(self.hit_rates)


@dataclass(frozen=True)
class Search:
    """All that was tried, in that order; the first is where the search started."""

    tried: list[Tried]

    @property
    def best(self) -> Tried:
        """The highest mean over the sizes; of equals the first."""
        return max(self.tried, key=lambda one: one.mean)


def search(
    trace: Trace,
    make: Make,
    start: Choice,
    values: Mapping[str, Sequence[str]],
    sizes: Sequence[int],
    told: Told | None = None,
) -> Search:
    """Coordinate search: each key in turn takes the best of its values while the others stay, until
    a whole round changes nothing. Every choice is replayed once.

    make: the policy under a choice. start: of the keys in `values`. told: hears of each replay.
    """
    visits = Visits.of(trace)
    found: dict[tuple[str, ...], Tried] = {}

    def tried(choice: Choice) -> Tried:
        key = tuple(choice.values())
        if key not in found:
            policy = make(choice)
            rates = []
            for size in sizes:
                counts = simulate(visits, policy, size)
                rates.append(int(counts[..., HITS].sum()) / int(counts[..., LOOKUPS].sum()))
            found[key] = Tried(choice, rates)
            if told:
                told(f"{len(found)} choices, {found[key].mean:.2%} hits")
        return found[key]

    best, before = tried(dict(start)), None
    while best is not before:
        before = best
        for key, options in values.items():
            others = [tried({**best.choice, key: value}) for value in options]
            best = max([best, *others], key=lambda one: one.mean)
    return Search(list(found.values()))
