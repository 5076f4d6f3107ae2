"""A report: what was read, who wins, and the pictures, before any of it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from residency.policies.errors import ConfigError
from residency.reports.advice import Advice, advice_of
from residency.reports.against import Comparison, compare
from residency.reports.contests import Contest, contests_of, titles_of
from residency.reports.crossings import Meeting, meetings_of
from residency.reports.effects import Effect, effects_of
from residency.reports.figures import curves, decode, heat, moved, ttft
from residency.reports.figures.style import Picture
from residency.reports.reading import ResultSet
from residency.reports.replays import drawn_of, saved
from residency.reports.winners import Place, places_of

BASE = "B"  # before the numbers of the base's jobs


@dataclass(frozen=True)
class Section:
    """One contest, judged and drawn. missing: curves that could not be drawn, a line each."""

    title: str
    contest: Contest
    places: list[Place]
    advice: Advice | None
    effects: list[Effect]
    meetings: list[Meeting]
    pictures: list[Picture]
    missing: list[str]


@dataclass(frozen=True)
class Report:
    """base, comparison: None where nothing was to be compared. replays: pictures of their own."""

    found: ResultSet
    sections: list[Section]
    replays: list[Picture]
    left_out: list[str]
    base: ResultSet | None
    comparison: Comparison | None

    @property
    def pictures(self) -> list[Picture]:
        return [*(each for section in self.sections for each in section.pictures), *self.replays]

    @property
    def all_jobs(self) -> list[ResultSet]:
        return [self.found] if self.base is None else [self.found, self.base]


def report_on(found: ResultSet, base: ResultSet | None = None) -> Report:
    """Judge and draw what was read, beside `base` if there is one."""
    contests = contests_of(found)
    titled = zip(titles_of(contests), contests, strict=True)
    sections = [_section(title, contest, str(n)) for n, (title, contest) in enumerate(titled, 1)]
    replays, left_out = [], list(found.left_out)
    for number, node in enumerate(found.replays, 1):
        try:
            drawn = curves.picture(saved(node), f"replay-{number}")
        except ConfigError as error:
            left_out.append(str(error))
            continue
        replays += [drawn] if drawn is not None else []
    if base is None:
        return Report(found, sections, replays, left_out, None, None)
    jobs = tuple(replace(job, number=f"{BASE}{job.number}") for job in base.jobs)
    other = replace(base, jobs=jobs)
    comparison = compare(contests, contests_of(other))
    return Report(found, sections, replays, left_out, other, comparison)


def _section(title: str, contest: Contest, name: str) -> Section:
    meetings = meetings_of(contest)
    drawn, missing = drawn_of(contest)
    pictures = [
        ttft.picture(contest, meetings, f"ttft-{name}") if contest.places else None,
        decode.picture(contest, f"decode-{name}"),
        *(curves.picture(each, f"curves-{name}-{n}") for n, each in enumerate(drawn, 1)),
        moved.picture(contest, f"bytes-{name}"),
        heat.picture(contest, f"hits-{name}"),
    ]
    missing += [f"{each.title}: {note}" for each in drawn if not each.lines for note in each.notes]
    return Section(
        title,
        contest,
        places_of(contest),
        advice_of(contest),
        effects_of(contest),
        meetings,
        [picture for picture in pictures if picture is not None],
        missing,
    )
