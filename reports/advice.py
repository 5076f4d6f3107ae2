"""Advice: which configuration to use, in sentences with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from residency.reports.contests import SLOTS, Contest, Entrant
from residency.reports.measures import DECODE, TTFT, At, Measure, place_text
from residency.reports.units import listed, shares, size
from residency.reports.verdicts import Verdict, change_text, verdict
from residency.reports.winners import Place, named, recommended, shared


class Outcome(StrEnum):
    """How one entrant stands among all at one point, best first."""

    LEADS = "the fastest, beyond noise,"
    LEVEL = "within noise of the fastest"
    ALL_LEVEL = "all are within noise of each other"
    UNJUDGED = "no verdict, since some have a single run,"
    TRAILS = "slower, beyond noise,"


BESIDE = {
    Outcome.LEADS: "the next, ",
    Outcome.LEVEL: "the next that is slower beyond noise, ",
    Outcome.UNJUDGED: "",
    Outcome.TRAILS: "the fastest, ",
}
MOST_NAMED = 3


@dataclass(frozen=True)
class Advice:
    """The configuration to use. because: why, in short. reasons: a sentence each.

    others: when which other is better. judged: whether any verdict was possible.
    """

    entrant: Entrant
    because: str
    reasons: tuple[str, ...]
    others: tuple[str, ...]
    judged: bool


def advice_of(contest: Contest) -> Advice | None:
    """None where fewer than two entrants have a point in common with all others."""
    best = recommended(contest.entrants)
    if best is None:
        return None
    places = shared(contest.entrants)
    reasons = [*_where(best, places), *_why(best, places)]
    judged = any(
        place.verdict_of(each) is not Verdict.NONE for place in places for each in place.ranking
    )
    because = _because(best, places)
    return Advice(best, because, tuple(reasons), tuple(_others(best, places, contest)), judged)


def _where(best: Entrant, places: Sequence[Place]) -> list[str]:
    """How the recommended one does: a sentence for decode, and for the prompts of each place."""
    found = []
    for name, group in _groups(places):
        said = [_outcome(best, place) for place in group]
        texts = []
        for kind in Outcome:
            own = [
                (place, other)
                for place, (each, other) in zip(group, said, strict=True)
                if each is kind
            ]
            texts += [_said(best, kind, own)] if own else []
        found.append(f"{name}: {'; '.join(texts)}.")
    return found


def _because(best: Entrant, places: Sequence[Place]) -> str:
    """One clause for decode, one for all prompts."""
    found, counts = [], dict.fromkeys(Outcome, 0)
    for place in places:
        kind, other = _outcome(best, place)
        if place.at.quantity != DECODE:
            counts[kind] += 1
        elif kind in (Outcome.LEADS, Outcome.TRAILS) and other is not None:
            beside = "the next" if kind is Outcome.LEADS else "the fastest"
            change = change_text(best.measures[place.at], other.measures[place.at])
            found.append(f"decode takes {change} {beside}")
        else:
            found.append("decode is within noise of the fastest")
    level, trails = counts[Outcome.LEVEL] + counts[Outcome.ALL_LEVEL], counts[Outcome.TRAILS]
    words = {"the fastest alone": counts[Outcome.LEADS], "within noise of it": level}
    words |= {"slower": trails}
    texts = [f"{text} at {number}" for text, number in words.items() if number]
    if texts:
        texts[0] += f" of {sum(counts.values())} points"
        texts[0] = texts[0].replace("noise of it", "noise of the fastest")
        found.append(f"TTFT is {listed(texts)}")
    return "; ".join(found)


def _groups(places: Sequence[Place]) -> list[tuple[str, list[Place]]]:
    groups: dict[str, list[Place]] = {}
    for place in places:
        pool = place_text(place.at.place)
        name = place.at.quantity if place.at.quantity == DECODE or not pool else f"{TTFT}, {pool}"
        groups.setdefault(name, []).append(place)
    return list(groups.items())


def _outcome(best: Entrant, place: Place) -> tuple[Outcome, Entrant | None]:
    """And the entrant that it is told beside, if there is one."""
    own = best.measures[place.at]
    if place.verdict_of(best) is Verdict.SLOWER:
        return Outcome.TRAILS, place.best
    if best is place.best and not place.level and len(place.ranking) > 1:
        return Outcome.LEADS, place.ranking[1]
    if place.verdict_of(place.ranking[-1]) is Verdict.NONE:
        return Outcome.UNJUDGED, place.ranking[1] if best is place.best else place.best
    slower = [e for e in place.ranking if verdict(own, e.measures[place.at]) is Verdict.FASTER]
    return (Outcome.LEVEL, slower[0]) if slower else (Outcome.ALL_LEVEL, None)


def _said(best: Entrant, kind: Outcome, own: Sequence[tuple[Place, Entrant | None]]) -> str:
    """kind's words, where, and by how much beside whom."""
    lengths = [f"{place.at.tokens:,}" for place, _ in own if place.at.quantity == TTFT]
    where = f" at {listed(lengths)} tokens" if lengths else ""
    pairs = [(place, other) for place, other in own if other is not None]
    if not pairs:
        return f"{kind}{where}"
    ratios = [best.measures[p.at].median / other.measures[p.at].median for p, other in pairs]
    names = list(dict.fromkeys(named(other) for _, other in pairs))
    beside = f"{BESIDE[kind]}{listed(names[:MOST_NAMED])}"
    beside += " and others" if len(names) > MOST_NAMED else ""
    below = [1 - ratio for ratio in ratios if ratio <= 1]
    above = [ratio - 1 for ratio in ratios if ratio > 1]
    texts = [f"{shares(below)} less time than"] if below else []
    texts += [f"{shares(above)} more time than"] if above else []
    return f"{kind}{where} ({' or '.join(texts)} {beside})"


def _why(best: Entrant, places: Sequence[Place]) -> list[str]:
    """What goes with the time: the bytes over the link, and in decode the hits, beside the slowest
    of those that are slower beyond noise. Of prompts, at the length where that one lies furthest
    behind.
    """
    found = []
    decode = [place for place in places if place.at.quantity == DECODE]
    prompts = [place for place in places if place.at.quantity == TTFT]
    furthest = max(prompts, key=lambda place: place.over_best(place.ranking[-1]), default=None)
    for place in [*decode, *([] if furthest is None else [furthest])]:
        own, last = best.measures[place.at], place.ranking[-1]
        other = last.measures[place.at]
        if verdict(own, other) is not Verdict.FASTER:
            continue
        if own.link_bytes is None or other.link_bytes is None:
            continue
        each = "a step of decode" if place.at.quantity == DECODE else f"a prompt of {place.at.text}"
        moved = f"{each.replace(f'{TTFT} at ', '')} moves {_moved(own)} over the link"
        slowest = f"the slowest, {named(last)}, moves {_moved(other)}"
        if own.link_bytes < other.link_bytes * 0.98:
            found.append(f"Why: {moved}; {slowest}.")
        else:
            found.append(f"Bytes over the link do not explain it: {moved}; {slowest}.")
    return found


def _moved(measure: Measure) -> str:
    text = size(measure.link_bytes or 0)
    hits = measure.hit_rate
    if measure.at.quantity != DECODE or hits is None:
        return text
    return f"{text} ({hits:.0%} of its lookups are hits)"


def _others(best: Entrant, places: Sequence[Place], contest: Contest) -> list[str]:
    groups: dict[str, list[Place]] = {}
    for place in places:
        if place.verdict_of(best) is Verdict.SLOWER:
            groups.setdefault(named(place.best), []).append(place)
    found = []
    for name, group in groups.items():
        gains = [1 - 1 / place.over_best(best) for place in group]
        points = listed([place.at.text for place in group])
        found.append(f"For {points}: {name} takes {shares(gains)} less time.")
    return [*found, *_by_pool(best, contest)]


def _by_pool(best: Entrant, contest: Contest) -> list[str]:
    """The best of each other size of the pool: fewer slots cost less of the device's memory."""
    if SLOTS not in contest.varied or best.result.num_slots is None:
        return []
    pools: dict[int, list[Entrant]] = {}
    for entrant in contest.entrants:
        if entrant.result.num_slots is not None:
            pools.setdefault(entrant.result.num_slots, []).append(entrant)
    found = []
    for slots, entrants in sorted(pools.items()):
        own = recommended(entrants) or entrants[0]
        if slots == best.result.num_slots:
            continue
        gap = (slots - best.result.num_slots) * own.result.memory.get("row_bytes", 0)
        memory = f"{size(abs(gap))} of device memory {'more' if gap > 0 else 'less'}"
        change = ""
        if (decode := At(DECODE)) in own.measures and decode in best.measures:
            one, other = own.measures[decode], best.measures[decode]
            change = f"; decode takes {change_text(one, other)} the recommended"
            change += f" ({verdict(one, other)})"
        found.append(f"With a pool of {slots:,} slots ({memory}): {named(own)}{change}.")
    return found
