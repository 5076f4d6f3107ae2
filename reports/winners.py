"""Winners: who is fastest where, and which configuration to use on the whole.

The rule of the recommendation is on every page, in the words of RULE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from residency.reports.contests import Contest, Entrant
from residency.reports.measures import DECODE, At, Measure
from residency.reports.verdicts import Verdict, verdict

RULE = (
    "Recommended is a configuration that is slower than the best nowhere, beyond noise; where "
    "there is none, or several, the one with the lowest mean over decode (one half) and all prompt "
    "lengths (the other half) of log(its median / the best median)."
)


@dataclass(frozen=True)
class Place:
    """One point of a contest. ranking: all who were timed there, the least median first."""

    at: At
    ranking: tuple[Entrant, ...]

    @property
    def best(self) -> Entrant:
        return self.ranking[0]

    @property
    def best_measure(self) -> Measure:
        return self.best.measures[self.at]

    @property
    def level(self) -> list[Entrant]:
        """Those that cannot be told from the best, itself left out."""
        noise = (Verdict.WITHIN_NOISE, Verdict.NONE)
        return [each for each in self.ranking[1:] if self.verdict_of(each) in noise]

    @property
    def behind(self) -> Entrant | None:
        """The fastest of those that are slower than the best beyond noise."""
        found = [each for each in self.ranking if self.verdict_of(each) is Verdict.SLOWER]
        return found[0] if found else None

    def verdict_of(self, entrant: Entrant) -> Verdict:
        """What it is beside the best."""
        return verdict(entrant.measures[self.at], self.best_measure)

    def over_best(self, entrant: Entrant) -> float:
        return entrant.measures[self.at].median / self.best_measure.median


def places_of(contest: Contest) -> list[Place]:
    return [_place(at, contest.entrants) for at in contest.points]


def _place(at: At, entrants: Sequence[Entrant]) -> Place:
    there = [entrant for entrant in entrants if at in entrant.measures]
    return Place(at, tuple(sorted(there, key=lambda entrant: entrant.measures[at].median)))


def shared(entrants: Sequence[Entrant]) -> list[Place]:
    """The points that every entrant was timed at."""
    common = set.intersection(*(set(entrant.measures) for entrant in entrants))
    ordered = sorted(common, key=lambda at: (at.quantity != DECODE, at))
    return [_place(at, entrants) for at in ordered]


def recommended(entrants: Sequence[Entrant]) -> Entrant | None:
    places = shared(entrants) if len(entrants) > 1 else []
    if not places:
        return None
    never_slower = [
        each
        for each in entrants
        if all(place.verdict_of(each) is not Verdict.SLOWER for place in places)
    ]
    return min(never_slower or entrants, key=lambda each: _cost(each, places))


def _cost(entrant: Entrant, places: Sequence[Place]) -> float:
    """Mean log ratio to the best: decode and prompts count alike."""
    logs: dict[bool, list[float]] = {}
    for place in places:
        over = math.log(place.over_best(entrant))
        logs.setdefault(place.at.quantity == DECODE, []).append(over)
    return sum(sum(each) / len(each) for each in logs.values()) / len(logs)


def named(entrant: Entrant) -> str:
    return f"{entrant.label} (job {entrant.number})"
