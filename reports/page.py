"""The page: one HTML file without anything to load, filled from a report."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined

from residency.reports import verdicts, winners
from residency.reports.figures.style import Picture
from residency.reports.reading import Job, State
from residency.reports.report import Report, Section
from residency.reports.results import Result
from residency.reports.tables import (
    Table,
    comparison_table,
    crossings_table,
    decode_table,
    effects_table,
    ttft_table,
    winners_table,
)
from residency.reports.verdicts import Verdict
from residency.reports.wording import (
    answer,
    effects_text,
    machine,
    others,
    progress,
    question,
    reasons,
    unfinished,
    warnings,
)

TEMPLATE = "page.html.j2"
FLOOR = (
    "A floor is the least time that a plan can take which moves the same bytes over the link and "
    "computes the same, both timed in the same process."
)
CHANGE = "x % less or more time is said of the medians, as a share of the time of what is named."
RULES = (verdicts.RULE, verdicts.CHANCE, winners.RULE, CHANGE, FLOOR)


@dataclass(frozen=True)
class SourceLine:
    """A row of the table of sources. href: relative to the page's folder."""

    number: str
    label: str
    href: str
    file: str
    written: str
    notes: list[str]


def page_html(report: Report, out: Path) -> str:
    """The page as it will lie in `out`."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    source = resources.files("residency.reports").joinpath(TEMPLATE).read_text("utf-8")
    return environment.from_string(source).render(context(report, out))


def context(report: Report, out: Path) -> dict[str, Any]:
    """What the template is filled with; all texts are as they stand in the results."""
    found = report.found
    return {
        "title": title_of(report),
        "folders": ", ".join(str(folder) for folder in found.folders),
        "progress": progress(found),
        "asked": " ".join(found.asked),
        "sections": [_section(section, report) for section in report.sections],
        "comparison": comparison_of(report),
        "replays": [_picture(picture) for picture in report.replays],
        "failed": [job for job in found.jobs if job.state in (State.FAILED, State.DAMAGED)],
        "unfinished": [job for job in found.jobs if job.state in (State.RUNNING, State.WAITING)],
        "skipped": found.skipped,
        "duplicates": found.duplicates,
        "left_out": report.left_out,
        "rules": RULES,
        "sources": sources_of(report, out),
        "version": metadata.version("residency"),
    }


def title_of(report: Report) -> str:
    if len(report.sections) != 1:
        return "Which configuration to use"
    return f"Which configuration to use: {report.sections[0].title}"


def summary_tables(section: Section) -> list[Table]:
    """What a reader needs first."""
    several = len(section.contest.entrants) > 1
    return [winners_table(section.places)] if several else []


def detail_tables(section: Section) -> list[Table]:
    found = [ttft_table(section.contest, place) for place in section.contest.places]
    found += [table] if (table := decode_table(section.contest)) is not None else []
    found += [crossings_table(section.meetings)] if section.meetings else []
    found += [effects_table(section.effects)] if section.effects else []
    return found


def comparison_of(report: Report) -> dict[str, Any] | None:
    comparison = report.comparison
    if comparison is None or report.base is None:
        return None
    counts = [f"{comparison.count(one)} {one}" for one in Verdict if comparison.count(one)]
    base = ", ".join(str(folder) for folder in report.base.folders)
    return {
        "summary": f"{', '.join(counts) or 'no rows in common'}; the base is {base}.",
        "differences": comparison.differences,
        "alone": comparison.alone,
        "table": comparison_table(comparison),
    }


def sources_of(report: Report, out: Path) -> list[SourceLine]:
    labels = {
        each.job.number: each.job.title
        for section in report.sections
        for each in section.contest.entrants
    }
    labels |= {
        each.number: each.label
        for section in report.sections
        for each in section.contest.entrants
        if not each.mode
    }
    return [
        _source(job, result, labels.get(job.number, job.title), out)
        for jobs in report.all_jobs
        for job, result in jobs.done
    ]


def _source(job: Job, result: Result, label: str, out: Path) -> SourceLine:
    file = relative(result.file, out)
    written = datetime.fromtimestamp(result.finished, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return SourceLine(job.number, label, quote(file), file, written, result.notes)


def relative(file: Path, out: Path) -> str:
    """The path from the page's folder."""
    return Path(os.path.relpath(file.resolve(), out.resolve())).as_posix()


def _section(section: Section, report: Report) -> dict[str, Any]:
    contest = section.contest
    return {
        "title": section.title,
        "question": question(contest),
        "warnings": [*unfinished(report.found), *warnings(contest)],
        "answer": answer(section),
        "reasons": reasons(section),
        "others": others(section),
        "effects": effects_text(section),
        "summary": summary_tables(section),
        "pictures": [_picture(picture) for picture in section.pictures],
        "missing": section.missing,
        "tables": detail_tables(section),
        "machine": machine(contest),
        "first": contest.entrants[0].number,
    }


def _picture(picture: Picture) -> dict[str, str]:
    return {
        "alt": picture.alt,
        "title": picture.title,
        "caption": picture.caption,
        "inline": base64.b64encode(picture.png).decode(),
    }
