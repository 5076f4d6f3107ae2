"""Folders as they are given: results, sweeps, and folders of both, with what is not there yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from residency.policies.errors import ConfigError
from residency.reports.nodes import Node
from residency.reports.results import Result, kind_of, read_result
from residency.runtime.replay.report import KIND as REPLAY
from residency.runtime.replay.report import TUNED
from residency.runtime.results import RESULT_NAME

SWEEP_NAME, FAILURE_NAME, RUNNING_NAME = "sweep.json", "failure.json", "running.json"
SWEEP_KIND, FAILURE_KIND, VERSION = "sweep", "failure", 1


class State(StrEnum):
    DONE = "measured"
    FAILED = "failed"
    DAMAGED = "damaged"
    RUNNING = "running, or killed while it ran"
    WAITING = "still to run"


@dataclass(frozen=True)
class Job:
    """One run that was asked for. title: what varies. error: one line, detail: its traceback."""

    number: str
    folder: Path
    title: str
    state: State
    result: Result | None = None
    error: str = ""
    detail: str = ""
    routes: Path | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A combination that cannot work. reasons: each with its mend."""

    overrides: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Duplicate:
    """A combination that is the same as that of a job."""

    overrides: tuple[str, ...]
    same_as: str


@dataclass(frozen=True)
class ResultSet:
    """All that the folders hold. replays: results of `residency replay`. left_out: why, a line
    each.
    """

    folders: tuple[Path, ...]
    jobs: tuple[Job, ...]
    asked: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    replays: tuple[Node, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def done(self) -> list[tuple[Job, Result]]:
        return [(job, job.result) for job in self.jobs if job.result is not None]


@dataclass
class _Found:
    jobs: list[Job] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    replays: list[Node] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[Path]) -> ResultSet:
    """Raises ConfigError for a folder that is none, holds nothing to show, or is itself damaged.

    Within a sweep or a folder of results a damaged file is a job or a line of its own.
    """
    found = _Found()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder")
        if (folder / SWEEP_NAME).is_file():
            _read_sweep(folder, found)
        elif (folder / RESULT_NAME).is_file():
            _read_one(folder, found)
        else:
            _read_several(folder, found)
    if not found.jobs and not found.replays:
        names = ", ".join(map(str, folders))
        why = f" ({found.left_out[0]})" if found.left_out else ""
        raise ConfigError(
            f"{names}: neither a {RESULT_NAME} nor a {SWEEP_NAME} to report on is there or one "
            f"folder below{why}; name a folder that residency sweep, bench or run wrote"
        )
    if len({job.number for job in found.jobs}) < len(found.jobs):
        found.jobs = [replace(job, number=str(n)) for n, job in enumerate(found.jobs)]
        found.duplicates = []
    return ResultSet(
        tuple(folders),
        tuple(found.jobs),
        tuple(found.asked),
        tuple(found.skipped),
        tuple(found.duplicates),
        tuple(found.replays),
        tuple(found.left_out),
    )


def _read_several(folder: Path, found: _Found) -> None:
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            if (below / SWEEP_NAME).is_file():
                _read_sweep(below, found)
            elif (below / RESULT_NAME).is_file():
                _read_one(below, found)
        except ConfigError as error:
            found.left_out.append(str(error))


def _read_one(folder: Path, found: _Found) -> None:
    node = Node.read(folder / RESULT_NAME)
    if kind_of(node) in (REPLAY, TUNED):
        found.replays.append(node)
        return
    result = read_result(folder)
    found.jobs.append(Job(str(len(found.jobs)), folder, folder.name, State.DONE, result))


def _read_sweep(folder: Path, found: _Found) -> None:
    node = Node.read(folder / SWEEP_NAME)
    if node.at("kind").value != SWEEP_KIND:
        node.at("kind").refuse(repr(SWEEP_KIND))
    if node.at("version").value != VERSION:
        node.at("version").refuse(f"{VERSION}, the version that this residency reads")
    jobs = [_job(folder, row) for row in node.at("jobs").rows()]
    skipped = [_skipped(row) for row in _rows(node, "skipped")]
    duplicates = [_duplicate(row) for row in _rows(node, "duplicates")]
    found.asked += node.at("overrides").texts()
    found.jobs += jobs
    found.skipped += skipped
    found.duplicates += duplicates


def _job(sweep: Path, row: Node) -> Job:
    number, title = str(row.at("number").count()), row.at("title").text()
    folder, routes = _inside(sweep, row.at("folder")), row.get("routes")
    job = Job(
        number,
        folder,
        title,
        State.WAITING,
        routes=None if routes is None else _inside(sweep, routes),
        overrides=tuple(row.at("overrides").texts()),
    )
    try:
        if (folder / RESULT_NAME).exists():
            return replace(job, state=State.DONE, result=read_result(folder))
        if (folder / FAILURE_NAME).exists():
            failure = Node.read(folder / FAILURE_NAME)
            detail = failure.get("detail")
            return replace(
                job,
                state=State.FAILED,
                error=failure.at("error").text(),
                detail="" if detail is None else detail.text(),
            )
    except ConfigError as error:
        return replace(job, state=State.DAMAGED, error=str(error))
    return replace(job, state=State.RUNNING) if (folder / RUNNING_NAME).exists() else job


def _inside(sweep: Path, node: Node) -> Path:
    """A path of the sweep's own. Raises ConfigError for one that leads elsewhere."""
    path = sweep / node.text()
    if not path.resolve().is_relative_to(sweep.resolve()):
        node.refuse("a path within the sweep's folder")
    return path


def _rows(node: Node, name: str) -> Iterator[Node]:
    below = node.get(name)
    yield from [] if below is None else below.rows()


def _skipped(row: Node) -> Skipped:
    reasons = tuple(
        (
            f"{', '.join(each.at('keys').texts())}: {each.at('reason').text()}",
            each.at("mend").text(),
        )
        for each in row.at("reasons").rows()
    )
    return Skipped(tuple(row.at("overrides").texts()), reasons)


def _duplicate(row: Node) -> Duplicate:
    same_as = row.at("same_as")
    name = same_as.text() if isinstance(same_as.value, str) else str(same_as.count())
    return Duplicate(tuple(row.at("overrides").texts()), name)
