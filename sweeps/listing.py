"""A sweep in words: what is skipped and why, the jobs and their numbers, as text or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from residency.policies.base import Conflict
from residency.sweeps.figures import Figures
from residency.sweeps.jobs import State
from residency.sweeps.sweep import Sweep

DASH = "-"


def skipped_lines(sweep: Sweep) -> Iterator[str]:
    """Each reason once, with the combinations that it forbids."""
    skipped = sweep.manifest.skipped
    if not skipped:
        return
    total = len(sweep.manifest.jobs) + len(skipped) + len(sweep.manifest.duplicates)
    yield f"{len(skipped)} of {total} combinations cannot work:"
    titles = _titles([one["overrides"] for one in skipped], sweep)
    by_reasons: dict[tuple[str, ...], list[str]] = {}
    for one, title in zip(skipped, titles, strict=True):
        by_reasons.setdefault(tuple(map(_conflict, one["reasons"])), []).append(title)
    for reasons, forbidden in by_reasons.items():
        yield from reasons
        yield from (f"    {title}" for title in forbidden)


def duplicate_lines(sweep: Sweep) -> Iterator[str]:
    duplicates = sweep.manifest.duplicates
    if duplicates:
        yield (
            f"{len(duplicates)} combinations differ from a job only in what both ignore, and are "
            "not run again:"
        )
    titles = _titles([one["overrides"] for one in duplicates], sweep)
    for one, title in zip(duplicates, titles, strict=True):
        yield f"    {title}: as job {one['same_as']}"


def job_lines(sweep: Sweep) -> Iterator[str]:
    """The jobs before they run."""
    states = sweep.states() if sweep.resumed else {}
    jobs = sweep.manifest.jobs
    yield f"{len(jobs)} jobs in {sweep.folder}:"
    for job in jobs:
        state = f" ({states[job.number]})" if sweep.resumed else ""
        yield f"    {job.number}: {job.title}{state}"


def jobs_table(sweep: Sweep) -> Table:
    """What became of each job."""
    states = sweep.states()
    jobs = sweep.manifest.jobs
    figures = [Figures.of(sweep.job_folder(job).result() or {}) for job in jobs]
    short, long = _headings(figures)
    table = Table(title=str(sweep.folder), title_justify="left")
    for name in ("job", "what varies"):
        table.add_column(name, overflow="fold")
    for name in (short, long, "decode", "hits"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for job, own in zip(jobs, figures, strict=True):
        table.add_row(
            str(job.number),
            job.title.replace("[", r"\["),
            *_cells(own, long),
            states[job.number],
        )
    if not long:
        table.columns.pop(3)
    return table


def as_dict(sweep: Sweep) -> dict[str, Any]:
    """The sweep and what became of it."""
    states = sweep.states()
    jobs = [
        {
            "number": job.number,
            "folder": job.folder,
            "title": job.title,
            "overrides": list(job.overrides),
            "state": str(states[job.number]),
            "error": (sweep.job_folder(job).failure() or {}).get("error"),
        }
        for job in sweep.manifest.jobs
    ]
    counts = Counter(states.values())
    return {
        "version": 1,
        "kind": "sweep",
        "folder": str(sweep.folder),
        "counts": {str(state): counts[state] for state in State},
        "jobs": jobs,
        "skipped": list(sweep.manifest.skipped),
        "duplicates": list(sweep.manifest.duplicates),
    }


def _conflict(reason: dict[str, Any]) -> str:
    return f"  {Conflict(tuple(reason['keys']), reason['reason'], reason['mend'])}"


def _titles(points: Sequence[Sequence[str]], sweep: Sweep) -> list[str]:
    """The words of each point that not all points of the sweep have."""
    everywhere = set.intersection(*map(set, [*points, *_asked(sweep)])) if points else set()
    return [" ".join(word for word in point if word not in everywhere) for point in points]


def _asked(sweep: Sweep) -> list[Sequence[str]]:
    manifest = sweep.manifest
    listed = [one["overrides"] for one in (*manifest.skipped, *manifest.duplicates)]
    return [*(job.overrides for job in manifest.jobs), *listed]


def _headings(figures: Sequence[Figures]) -> tuple[str, str]:
    """Of the shortest and the longest prompt; the second is empty where no job has two lengths."""
    ends = {(own.ttft_s[0][0], own.ttft_s[-1][0]) for own in figures if own.ttft_s}
    if len(ends) != 1:
        return "TTFT, shortest", "TTFT, longest"
    ((short, long),) = ends
    return f"TTFT of {short}", f"TTFT of {long}" if long != short else ""


def _cells(figures: Figures, long: str) -> Iterator[str]:
    ends = [figures.ttft_s[0], figures.ttft_s[-1]] if figures.ttft_s else [None, None]
    for end in ends:
        if end is None:
            yield DASH
        else:
            tokens = f" ({end[0]})" if long == "TTFT, longest" else ""
            yield f"{end[1] * 1e3:.1f} ms{tokens}"
    yield DASH if figures.decode_s is None else f"{figures.decode_s * 1e3:.2f} ms"
    yield DASH if figures.hit_rate is None else f"{figures.hit_rate:.1%}"
