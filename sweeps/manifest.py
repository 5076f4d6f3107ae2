"""sweep.json: the grid as it was decided before the first job, and nothing that changes later.

Imports nothing heavy: each process in which a launcher runs a job reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from residency.policies.errors import ConfigError
from residency.runtime.results import write_whole

NAME = "sweep.json"
VERSION, KIND = 1, "sweep"

Words = tuple[str, ...]  # the overrides of one combination


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
    def read(cls, folder: Path) -> Manifest:
        """Raises ConfigError where there is none, or none that can be read."""
        file = folder / NAME
        try:
            content = json.loads(file.read_text())
            if (content["version"], content["kind"]) != (VERSION, KIND):
                raise ConfigError(f"{file}: of another version than {VERSION} of a {KIND}")
            jobs = [Job(**job | {"overrides": tuple(job["overrides"])}) for job in content["jobs"]]
            skipped, duplicates = tuple(content["skipped"]), tuple(content["duplicates"])
            asked, machine = tuple(content["overrides"]), content["environment"]
            return cls(asked, tuple(jobs), skipped, duplicates, machine)
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
