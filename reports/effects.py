"""Effects: what one value of a key does beside another, all else being equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from residency.reports.contests import Contest, Entrant, label_of, without
from residency.reports.measures import At, Measure
from residency.reports.verdicts import Verdict, verdict

MOST_TOLD = 6
FEWEST_PAIRS = 2


@dataclass(frozen=True)
class Effect:
    """Pairs of configurations that differ in `key` alone. ratio: geometric mean over the pairs of
    the median with `value` over that with `other`.
    """

    key: str
    value: str
    other: str
    at: At
    verdicts: tuple[Verdict, ...]
    ratio: float

    def count(self, one: Verdict) -> int:
        return self.verdicts.count(one)


def effects_of(contest: Contest) -> list[Effect]:
    """Of every two values of every key that varies, at every point that pairs were timed at."""
    found = []
    for key, values in contest.varied.items():
        for i, other in enumerate(values):
            for value in values[i + 1 :]:
                for at in contest.points:
                    pairs = _pairs(contest.entrants, key, value, other, at)
                    if pairs:
                        found.append(_effect(key, value, other, at, pairs))
    return found


def telling(effects: Sequence[Effect]) -> list[str]:
    """The choices that matter by themselves, a sentence each: at least half of the pairs, and two,
    agree beyond noise and none says the contrary. The largest first.
    """
    found = []
    for effect in effects:
        faster, slower = effect.count(Verdict.FASTER), effect.count(Verdict.SLOWER)
        agreed = max(faster, slower)
        if (faster and slower) or agreed < FEWEST_PAIRS or agreed * 2 < len(effect.verdicts):
            continue
        one, other = effect.value, effect.other
        ratio = effect.ratio
        if slower:
            one, other, ratio = other, one, 1 / ratio
        pairs = len(effect.verdicts)
        found.append(
            (
                ratio,
                f"{effect.key}={one} instead of {other}: {effect.at.text} takes {1 - ratio:.0%} "
                f"less time (faster in {agreed} of {pairs} pairs alike in all else).",
            )
        )
    return [text for _, text in sorted(found)[:MOST_TOLD]]


def _effect(
    key: str, value: str, other: str, at: At, pairs: Sequence[tuple[Measure, Measure]]
) -> Effect:
    mean = sum(math.log(one.median / two.median) for one, two in pairs) / len(pairs)
    said = tuple(verdict(one, two) for one, two in pairs)
    return Effect(key, value, other, at, said, math.exp(mean))


def _pairs(
    entrants: Sequence[Entrant], key: str, value: str, other: str, at: At
) -> list[tuple[Measure, Measure]]:
    there = [entrant for entrant in entrants if at in entrant.measures]
    twins = {_rest(each, key): each for each in there if each.choice.get(key) == other}
    return [
        (each.measures[at], twin.measures[at])
        for each in there
        if each.choice.get(key) == value and (twin := twins.get(_rest(each, key))) is not None
    ]


def _rest(entrant: Entrant, key: str) -> str:
    return label_of(without(entrant.choice, [key]))
