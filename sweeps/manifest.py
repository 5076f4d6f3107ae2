"""sweep.json: the grid as it was decided before the first job, and nothing that changes later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from residency.policies.errors import ConfigError
from residency.runtime.environment import environment
from residency.runtime.results import write_whole
from residency.sweeps.expansion import Words
from residency.sweeps.grid import SHARED, Grid, Point, identity

NAME = "sweep.json"
VERSION, KIND = 1, "sweep"
ROUTES = "routes"


@dataclass(frozen=True)
class Job:
    """One combination. folder, routes: within the sweep's folder. title: what varies.

    group: equal for jobs of one model and device. routes: where their decode's are recorded.
    """

    number: int
    folder: str
    overrides: Words
    title: str
    group: int
    routes: str | None


@dataclass(frozen=True)
class Manifest:
    """What is in sweep.json. overrides: as they were given, Hydra's settings included."""

    overrides: Words
    jobs: tuple[Job, ...]
    skipped: tuple[dict[str, Any], ...]
    duplicates: tuple[dict[str, Any], ...]
    environment: dict[str, str]

    @classmethod
    def of(
        cls, overrides: Sequence[str], grid: Grid, folders: Sequence[str], *, routes: bool
    ) -> Manifest:
        """folders: of the grid's points. routes: whether they are recorded."""
        groups: dict[str, int] = {}
        recorded: dict[str, int] = {}
        titles = _titles([point.overrides for point in grid.points])
        jobs = []
        for number, point in enumerate(grid.points):
            group = groups.setdefault(identity(point.config, SHARED), len(groups))
            file = _routes(point, recorded) if routes else None
            jobs.append(Job(number, folders[number], point.overrides, titles[number], group, file))
        skipped = [
            {"overrides": list(one.overrides), "reasons": [asdict(why) for why in one.reasons]}
            for one in grid.skipped
        ]
        duplicates = [
            {"overrides": list(one.overrides), "same_as": one.same_as} for one in grid.duplicates
        ]
        # The machine that plans; each result.json names the one that ran, with its device.
        machine = environment(torch.device("cpu"))
        del machine["device"]
        return cls(tuple(overrides), tuple(jobs), tuple(skipped), tuple(duplicates), machine)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ConfigError where there is none, or none that can be read."""
        file = folder / NAME
        try:
            content = json.loads(file.read_text())
            if (content["version"], content["kind"]) != (VERSION, KIND):
                raise ConfigError(f"{file}: of another version than {VERSION} of a {KIND}")
            jobs = [Job(**job | {"overrides": tuple(job["overrides"])}) for job in content["jobs"]]
            others = (tuple(content[key]) for key in ("skipped", "duplicates"))
            return cls(tuple(content["overrides"]), tuple(jobs), *others, content["environment"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = "no sweep is there" if isinstance(error, OSError) else "it cannot be read"
            raise ConfigError(
                f"{folder}: {what} ({type(error).__name__}: {error}); a sweep's folder has a {NAME}"
            ) from error

    def write(self, folder: Path) -> None:
        """Raises OutputError."""
        content = json.dumps(self.as_dict(), indent=1).encode() + b"\n"
        write_whole({folder / NAME: content}, "--out")

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "kind": KIND} | asdict(self)

    def job_in(self, folder: str) -> Job:
        return next(job for job in self.jobs if job.folder == folder)


def _routes(point: Point, recorded: dict[str, int]) -> str | None:
    """One file for each workload on a model and device, whatever the policies."""
    if not point.config.workload.routes_are_recorded:
        return None
    same = identity(point.config, (*SHARED, "workload"))
    return f"{ROUTES}/{recorded.setdefault(same, len(recorded))}.safetensors"


def _titles(jobs: Sequence[Words]) -> list[str]:
    """The overrides of each job that not all of them have; all of an only one's."""
    everywhere = set(jobs[0]).intersection(*jobs) if jobs else set()
    own = [[word for word in job if word not in everywhere] for job in jobs]
    return [
        " ".join(word.lstrip("+") for word in words or job)
        for words, job in zip(own, jobs, strict=True)
    ]
