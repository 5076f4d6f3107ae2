"""The report in short: for the terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from residency.reports.page import comparison_of, relative, sources_of
from residency.reports.report import Report
from residency.reports.tables import comparison_table
from residency.reports.wording import answer, others, progress, reasons, unfinished, warnings


def summary_text(report: Report) -> Iterator[str]:
    """What was found, and the answer to each question."""
    yield progress(report.found)
    for job in report.found.jobs:
        if job.error:
            yield f"job {job.number}, {job.title}: {job.state}: {job.error}"
    yield from (f"left out: {line}" for line in report.left_out)
    several = len(report.sections) > 1
    for section in report.sections:
        head = f"{section.title}: " if several else ""
        yield head + answer(section)
        if not several:
            yield from (f"- {line}" for line in (*reasons(section), *others(section)))
            told = (*unfinished(report.found), *warnings(section.contest))
            yield from (f"beware: {line}" for line in told)


def summary_tables(report: Report) -> list[Table]:
    """The verdicts, where two sets have rows in common; the ranges are on the page."""
    if report.comparison is None or not report.comparison.rows:
        return []
    own = comparison_table(report.comparison)
    table = Table(title=Text(own.title), title_justify="left")
    for name in own.header:
        short = name not in ("configuration", "change")
        table.add_column(Text(name.replace(" in the ", "\n")), overflow="fold", no_wrap=short)
    for row in own.rows:
        texts = [cell.text.partition(" (")[0] if cell.origin else cell.text for cell in row]
        texts = [text.removesuffix(" time than the base") for text in texts]
        table.add_row(*map(Text, texts))
    return [table]


def comparison_text(report: Report) -> Iterator[str]:
    """How many rows have which verdict, and what must be known of the two sets."""
    compared = comparison_of(report)
    if compared is not None:
        yield compared["summary"]
        yield from compared["differences"]
        yield from compared["alone"]


def as_dict(report: Report, out: Path) -> dict[str, Any]:
    """docs/reports.md describes every key."""
    comparison = report.comparison
    rows = [] if comparison is None else comparison.rows
    return {
        "version": 1,
        "kind": "report",
        "questions": [
            {
                "title": section.title,
                "jobs": [each.number for each in section.contest.entrants],
                "use": None if section.advice is None else section.advice.entrant.label,
                "job": None if section.advice is None else section.advice.entrant.number,
                "answer": answer(section),
                "reasons": reasons(section),
                "others": others(section),
                "warnings": [*unfinished(report.found), *warnings(section.contest)],
            }
            for section in report.sections
        ],
        "jobs": [
            {"number": job.number, "title": job.title, "state": str(job.state), "error": job.error}
            for job in report.found.jobs
        ],
        "left_out": report.left_out,
        "verdicts": [
            {
                "job": row.entrant.number,
                "base_job": row.base.number,
                "configuration": row.entrant.label,
                "at": row.at.text,
                "median_s": row.one.median,
                "base_median_s": row.other.median,
                "verdict": str(row.verdict),
            }
            for row in rows
        ],
        "differences": [] if comparison is None else list(comparison.differences),
        "alone": [] if comparison is None else list(comparison.alone),
        "sources": {source.number: source.file for source in sources_of(report, out)},
        "files": sorted(relative(file, out) for file in out.iterdir() if file.is_file()),
    }
