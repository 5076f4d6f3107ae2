"""What a launcher calls for each job, in whichever process it likes."""

from __future__ import annotations

import os
import socket
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from residency.policies.errors import OutputError
from residency.sweeps.jobs import JobFolder, State
from residency.sweeps.locks import is_held
from residency.sweeps.manifest import Job, Manifest
from residency.sweeps.process import JobError, Unwanted, WorkerProcess

LOCK_NAME, STOP_NAME, COSTS_NAME = ".lock", ".stop", "costs"


class Hands:
    """The one worker that this process has, for jobs of one sweep, model and device."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._key: tuple[str, int] | None = None

    def worker(self, sweep: str, group: int, cwd: str) -> WorkerProcess:
        """One that has the group's model, or none yet. Raises JobError."""
        if self._worker is None or not self._worker.alive or self._key != (sweep, group):
            self.close()
            self._worker, self._key = WorkerProcess(Path(cwd)), (sweep, group)
        return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


hands = Hands()  # of the process: a launcher hands out copies of the task, one a job


@dataclass(frozen=True)
class Task:
    """Runs the job whose folder Hydra gives it. Goes through pickle.

    sweep: the sweep's folder. cwd, host: of who started it. beside: whether other processes run
    jobs of the same sweep, so that a GPU is given back after each job.
    """

    sweep: str
    cwd: str
    host: str
    beside: bool

    @classmethod
    def of(cls, folder: Path, *, beside: bool) -> Task:
        return cls(str(folder), os.getcwd(), socket.gethostname(), beside)

    def __call__(self, config: Any) -> None:
        """Whatever becomes of the job is written into its folder, and never raised."""
        manifest = Manifest.read(Path(self.sweep))
        self.run(manifest, manifest.job_in(str(HydraConfig.get().sweep.subdir)))

    def run(self, manifest: Manifest, job: Job) -> None:
        """Run one job, unless its result is there or the sweep was stopped."""
        folder = JobFolder(Path(self.sweep) / job.folder)
        if not self.wanted():
            return
        with folder.claimed():
            if folder.result() is not None:
                return
            device = "cpu"
            try:
                device = self._run(job, folder)
                folder.forget_failure()
            except Unwanted:
                return
            except JobError as error:
                folder.fail(str(error), error.detail)
            except OutputError as error:
                folder.fail(str(error), traceback.format_exc())
            except BaseException:
                hands.kill()
                raise
        if (self.beside and device != "cpu") or not self._more(manifest, job.group):
            hands.close()

    def wanted(self) -> bool:
        """Whether the sweep goes on. Where its parent runs, that can be asked of its lock too."""
        root = Path(self.sweep)
        if (root / STOP_NAME).exists():
            return False
        return self.host != socket.gethostname() or is_held(root / LOCK_NAME)

    def _run(self, job: Job, folder: JobFolder) -> str:
        root = Path(self.sweep)
        worker = hands.worker(self.sweep, job.group, self.cwd)
        request = {
            "overrides": list(job.overrides),
            "folder": str(folder.path),
            "routes": None if job.routes is None else str(root / job.routes),
            "costs": str(root / COSTS_NAME),
        }
        return worker.run(request, folder.tell, self.wanted)

    def _more(self, manifest: Manifest, group: int) -> bool:
        """Whether a job of the group still waits for someone to run it."""
        root = Path(self.sweep)
        own = (JobFolder(root / job.folder) for job in manifest.jobs if job.group == group)
        return any(folder.state is State.WAITING for folder in own)
