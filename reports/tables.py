"""Tables of a report: cells of text with the job and the place that each number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from residency.reports.against import Comparison
from residency.reports.contests import Contest, Entrant
from residency.reports.crossings import Meeting
from residency.reports.effects import Effect
from residency.reports.measures import DECODE, TTFT, At, Measure, place_text
from residency.reports.units import ms
from residency.reports.verdicts import Verdict, change_text
from residency.reports.winners import Place, named


@dataclass(frozen=True)
class Cell:
    """text: what is shown. job: whose number it is, if it is one. origin: where it stands there."""

    text: str
    job: str = ""
    origin: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def decode_table(contest: Contest) -> Table | None:
    """Fastest first; None where nothing was decoded."""
    at = At(DECODE)
    timed = [each for each in contest.entrants if at in each.measures]
    if not timed:
        return None
    timed.sort(key=lambda each: each.measures[at].median)
    rows = []
    for entrant in timed:
        measure = entrant.measures[at]
        told = [_rate(measure.hit_rate), _link(measure), _floor(measure)]
        slots = entrant.result.num_slots
        pool = "-" if slots is None else f"{slots:,}"
        first = entrant is timed[0]
        rows.append((*_head(entrant), _time(entrant, measure, strong=first), *_cells(pool, *told)))
    header = ("job", "configuration", "ms a token", "slots", "hits", "link MB a step", "x floor")
    note = "Median (least to most over runs), fastest first. x floor: the median over the floor."
    return Table("Decode", note, header, tuple(rows))


def ttft_table(contest: Contest, place: tuple[str, int]) -> Table:
    """A column a length; the fastest of each is strong."""
    points = [at for at in contest.points if at.quantity == TTFT and at.place == place]
    best = {
        at: min(e.measures[at].median for e in contest.entrants if at in e.measures)
        for at in points
    }
    rows = []
    for entrant in contest.entrants:
        if any(at in entrant.measures for at in points):
            times = [_point(entrant, at, best[at]) for at in points]
            rows.append((*_head(entrant), *times))
    header = ("job", "configuration", *(f"{at.tokens:,} tokens" for at in points))
    title = "Time to first token (ms)"
    if said := place_text(place) or (f"{place[0]} pool" if place[0] else ""):
        title = f"{title}, {said}"
    note = "Median (least to most over runs); bold: the fastest of its column by the median."
    return Table(title, note, header, tuple(rows))


def _point(entrant: Entrant, at: At, best: float) -> Cell:
    measure = entrant.measures.get(at)
    return Cell("-") if measure is None else _time(entrant, measure, measure.median == best)


def winners_table(places: Sequence[Place]) -> Table:
    """Who is fastest at each point, and how far the next lies behind."""
    rows = []
    for place in places:
        best, behind = place.best, place.behind
        cells = [Cell(place.at.text), Cell(named(best), best.number)]
        cells.append(_time(best, place.best_measure))
        level = ", ".join(each.short for each in place.level)
        cells.append(Cell(f"jobs {level}" if level else "none"))
        text = "none"
        if behind is not None:
            change = change_text(behind.measures[place.at], place.best_measure)
            text = f"{named(behind)}: {change} the fastest"
        cells.append(Cell(text, behind.number if behind else ""))
        rows.append(tuple(cells))
    header = ("at", "fastest", "ms", "not told from it", "the next that is slower beyond noise")
    note = "Not told from it: within noise of the fastest, or without a verdict."
    return Table("Which configuration wins where", note, header, tuple(rows))


def effects_table(effects: Sequence[Effect]) -> Table:
    """What each choice does by itself."""
    rows = []
    for effect in effects:
        none = effect.count(Verdict.NONE)
        said = [
            f"{effect.count(one)} {one}"
            for one in (Verdict.FASTER, Verdict.SLOWER, Verdict.WITHIN_NOISE)
            if effect.count(one)
        ]
        said += [f"{none} without verdict"] if none else []
        texts = (
            f"{effect.key}={effect.value}",
            f"{effect.key}={effect.other}",
            effect.at.text,
            f"{effect.ratio - 1:+.1%}",
            ", ".join(said),
        )
        rows.append(_cells(*texts))
    header = ("with", "instead of", "at", "time", "verdicts of the pairs")
    note = (
        "Pairs of jobs that differ in this choice alone. Time: geometric mean over the pairs of "
        "the change of the median; below zero is faster."
    )
    return Table("What each choice does by itself", note, header, tuple(rows))


def crossings_table(meetings: Sequence[Meeting]) -> Table:
    rows = []
    for meeting in meetings:
        where = place_text(meeting.place) or f"{meeting.place[0] or 'cold'} pool"
        tokens = "they do not cross" if meeting.tokens is None else f"{meeting.tokens:.0f} tokens"
        origin = meeting.pointer
        number = meeting.before.number
        cells = (Cell(named(meeting.before), number), Cell(named(meeting.after)), Cell(where))
        rows.append((*cells, Cell(tokens, number if origin else "", origin)))
    header = ("faster below", "faster above", "where", "crossing")
    note = "Where the lines through the medians meet, both axes logarithmic."
    return Table("Crossings", note, header, tuple(rows))


def comparison_table(comparison: Comparison) -> Table:
    rows = []
    for row in comparison.rows:
        said = row.verdict
        rows.append(
            (
                *_head(row.entrant),
                Cell(row.at.text),
                _time(row.entrant, row.one),
                _time(row.base, row.other),
                Cell(row.change),
                Cell(str(said), strong=said in (Verdict.FASTER, Verdict.SLOWER)),
            )
        )
    header = ("job", "configuration", "at", "ms now", "ms in the base", "change", "verdict")
    note = "Median (least to most over runs). The base's job numbers begin with B."
    return Table("Verdict by row", note, header, tuple(rows))


def _head(entrant: Entrant) -> tuple[Cell, ...]:
    return Cell(entrant.number, entrant.number), Cell(entrant.label)


def _time(entrant: Entrant, measure: Measure, strong: bool = False) -> Cell:
    text = ms(measure.median)
    if measure.num_runs > 1:
        text = f"{text} ({ms(measure.least)} to {ms(measure.most)})"
    return Cell(text, entrant.number, measure.pointer, strong)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _link(measure: Measure) -> str:
    return "-" if measure.link_bytes is None else f"{measure.link_bytes / 1e6:,.2f}"


def _floor(measure: Measure) -> str:
    return "-" if measure.floor_s is None else f"{measure.median / measure.floor_s:.2f}"


def _cells(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(text) for text in texts)
