"""The report as Markdown, for a page of a repository: sentences, tables and links to pictures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from residency.reports.figures.style import Picture
from residency.reports.page import (
    RULES,
    comparison_of,
    detail_tables,
    sources_of,
    summary_tables,
    title_of,
)
from residency.reports.reading import ResultSet, State
from residency.reports.report import Report, Section
from residency.reports.tables import Table
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

SPECIAL = re.compile(r"([\\`*_{}\[\]()#|~$])")


def page_markdown(report: Report, out: Path) -> str:
    return "\n".join(_lines(report, out)) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _lines(report: Report, out: Path) -> Iterator[str]:
    yield from (f"# {plain(title_of(report))}", "", plain(progress(report.found)), "")
    for section in report.sections:
        yield from _section(section, report)
    if (compared := comparison_of(report)) is not None:
        yield from ("## Against the base", "", plain(compared["summary"]), "")
        yield from _list(compared["differences"])
        yield from _table(compared["table"])
        yield from _list(compared["alone"])
    if report.replays:
        yield from ("## Replays", "")
        yield from (line for picture in report.replays for line in _picture(picture))
    yield from _not_measured(report.found, report.left_out)
    yield from ("## How to read this", "")
    yield from _list(RULES)
    yield from ("## Sources", "")
    for source in sources_of(report, out):
        yield f"- job {source.number}, {plain(source.label)}: [{plain(source.file)}]({source.href})"


def _section(section: Section, report: Report) -> Iterator[str]:
    contest = section.contest
    yield from (f"## {plain(section.title)}", "")
    for line in question(contest):
        yield from (plain(line), "")
    yield from _list(
        [f"Beware: {line}" for line in (*unfinished(report.found), *warnings(contest))]
    )
    yield from (f"**{plain(answer(section))}**", "")
    yield from _list(reasons(section))
    yield from _list([f"Otherwise: {line}" for line in others(section)])
    yield from _list([f"By itself: {line}" for line in effects_text(section)])
    for table in summary_tables(section):
        yield from _table(table)
    for picture in section.pictures:
        yield from _picture(picture)
    yield from _list(section.missing)
    for table in detail_tables(section):
        yield from _table(table)
    told = ", ".join(f"{name} {value}" for name, value in machine(contest))
    yield from (f"Machine (job {contest.entrants[0].number}): {plain(told)}", "")


def _picture(picture: Picture) -> tuple[str, ...]:
    return (f"![{plain(picture.alt)}]({picture.file})", "", plain(picture.caption), "")


def _not_measured(found: ResultSet, left_out: list[str]) -> Iterator[str]:
    lines = [
        f"job {job.number}, {job.title}: {job.state}" + (f": {job.error}" if job.error else "")
        for job in found.jobs
        if job.state is not State.DONE
    ]
    for each in found.skipped:
        why = "; ".join(f"{reason}, mend it with {mend}" for reason, mend in each.reasons)
        lines.append(f"skipped, {' '.join(each.overrides)}: {why}")
    lines += [f"{' '.join(each.overrides)}: as job {each.same_as}" for each in found.duplicates]
    lines += [f"left out: {line}" for line in left_out]
    if lines:
        yield from ("## What was not measured", "")
        yield from _list(lines)


def _list(lines: Iterable[str]) -> Iterator[str]:
    listed = [f"- {plain(line)}" for line in lines]
    yield from [*listed, ""] if listed else []


def _table(table: Table) -> Iterator[str]:
    yield from (f"### {plain(table.title)}", "", plain(table.note), "")
    yield f"| {' | '.join(map(plain, table.header))} |"
    yield f"| {' | '.join('---' for _ in table.header)} |"
    for row in table.rows:
        cells = [f"**{plain(cell.text)}**" if cell.strong else plain(cell.text) for cell in row]
        yield f"| {' | '.join(cells)} |"
    yield ""
