"""Crossings: the lengths at which another configuration becomes the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from residency.reports.contests import Contest, Entrant
from residency.reports.measures import TTFT, At
from residency.reports.verdicts import Verdict, verdict
from residency.runtime.bench.crossing import crossing


@dataclass(frozen=True)
class Meeting:
    """Where the medians of two take the same time, both axes logarithmic.

    before: faster below. after: faster above. tokens: None where they were compared and do not
    meet. pointer: in the result's own file, where it is told there; else empty.
    """

    place: tuple[str, int]
    before: Entrant
    after: Entrant
    tokens: float | None
    pointer: str = ""

    @property
    def pair(self) -> tuple[Entrant, Entrant]:
        return self.before, self.after


def meetings_of(contest: Contest) -> list[Meeting]:
    """Those that a result names, and wherever the fastest changes with noise not the reason."""
    found = list(_named(contest))
    for place in contest.places:
        lengths = sorted({at.tokens for at in contest.points if _is_at(at, place)})
        whole = [e for e in contest.entrants if all(_at(place, n) in e.measures for n in lengths)]
        if len(whole) < 2:
            continue
        fastest = [min(whole, key=lambda e: e.measures[_at(place, n)].median) for n in lengths]
        kept = [fastest[0]]
        for lead in fastest[1:]:
            # Who leads within noise alone takes no one's place.
            if lead is not kept[-1] and _leads(kept[-1], lead, place, lengths):
                kept.append(lead)
        for before, after in pairwise(kept):
            if any(
                {*map(id, m.pair)} == {id(before), id(after)} and m.place == place for m in found
            ):
                continue
            lines = [[e.measures[_at(place, n)].median for n in lengths] for e in (before, after)]
            tokens = crossing(lengths, *lines)
            if tokens is not None:
                found.append(Meeting(place, before, after, tokens))
    return found


def _leads(before: Entrant, after: Entrant, place: tuple[str, int], lengths: Sequence[int]) -> bool:
    """Whether the first is faster at a length and the second at a longer one, beyond noise."""
    said = [verdict(*(e.measures[_at(place, n)] for e in (before, after))) for n in lengths]
    if Verdict.FASTER not in said:
        return False
    return Verdict.SLOWER in said[said.index(Verdict.FASTER) :]


def _named(contest: Contest) -> list[Meeting]:
    found = []
    for each in contest.crossings:
        pair = [e for name in each.modes for e in contest.entrants if e.mode == name]
        if len(pair) == 2 and all(any(_is_at(at, each.place) for at in e.measures) for e in pair):
            before, after = _ordered(pair, each.place)
            found.append(Meeting(each.place, before, after, each.tokens, each.pointer))
    return found


def _ordered(pair: list[Entrant], place: tuple[str, int]) -> list[Entrant]:
    """The one first that is faster at the shortest length."""
    common = [at for at in pair[0].measures if at in pair[1].measures and _is_at(at, place)]
    first = min(common, default=None)
    return pair if first is None else sorted(pair, key=lambda e: e.measures[first].median)


def _is_at(at: At, place: tuple[str, int]) -> bool:
    return at.quantity == TTFT and at.place == place


def _at(place: tuple[str, int], tokens: int) -> At:
    return At(TTFT, *place, tokens)
