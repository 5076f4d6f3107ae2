"""A sweep: its folder, its grid, and what is left of it to run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from residency.policies.errors import ConfigError, OutputError
from residency.runtime.results import RESULT_NAME, require_writable
from residency.sweeps import launching
from residency.sweeps.grid import grid_of
from residency.sweeps.jobs import JobFolder, State
from residency.sweeps.locks import held_at_once
from residency.sweeps.manifest import NAME, Job, Manifest
from residency.sweeps.planning import manifest_of
from residency.sweeps.progress import Progress
from residency.sweeps.settings import BASIC, FOLDER, Settings, split
from residency.sweeps.task import LOCK_NAME, STOP_NAME, Task, hands


@dataclass(frozen=True)
class Sweep:
    """settings: Hydra's, with `folder` in them. resumed: whether sweep.json is there already."""

    folder: Path
    manifest: Manifest
    settings: Settings
    resumed: bool

    @classmethod
    def planned(
        cls,
        overrides: Sequence[str],
        out: Path | None = None,
        *,
        routes: bool = True,
        told: Callable[[int, int], None] | None = None,
    ) -> Sweep:
        """The sweep that overrides describe; writes nothing. Raises ConfigError or OutputError."""
        settings, rest = split(overrides)
        if out is not None:
            if any(word.startswith(f"{FOLDER}=") for word in settings.folders):
                raise ConfigError(f"--out {out}: {FOLDER} says the same; give one of them")
            settings = settings.into(out.absolute())
        launching.check_launcher(settings)
        folder = launching.sweep_folder(settings)
        if (folder / NAME).exists():
            raise OutputError(
                f"{folder}: there is a sweep already; go on with it by --resume {folder}, or "
                "choose another folder"
            )
        if (folder / RESULT_NAME).exists():
            raise OutputError(f"{folder}: there is a {RESULT_NAME}; choose another folder")
        grid = grid_of(rest, told)
        settings = settings.into(folder)
        folders = launching.job_folders(settings, [point.overrides for point in grid.points])
        manifest = manifest_of(overrides, grid, folders, routes=routes)
        return cls(folder, manifest, settings, resumed=False)

    @classmethod
    def found(cls, folder: Path, overrides: Sequence[str]) -> Sweep:
        """The sweep in `folder`, to be gone on with; overrides: of its launcher, if another.

        Raises ConfigError.
        """
        folder = folder.absolute()
        manifest = Manifest.read(folder)
        settings, rest = split(overrides)
        if others := [*rest, *settings.folders]:
            raise ConfigError(
                f"{others[0]}: a sweep that is resumed has its grid and its folders; beside "
                "--resume only hydra/launcher=... and hydra.launcher.KEY=... may stand"
            )
        if not settings.launching:
            settings, _ = split(manifest.overrides)
        settings = Settings(settings.launcher, settings.launching).into(folder)
        launching.check_launcher(settings)
        return cls(folder, manifest, settings, resumed=True)

    def job_folder(self, job: Job) -> JobFolder:
        return JobFolder(self.folder / job.folder)

    def states(self) -> dict[int, State]:
        """By job number."""
        return {job.number: self.job_folder(job).state for job in self.manifest.jobs}

    def run(self, console: Console) -> None:
        """Run what has no whole result, with progress on `console`.

        Raises OutputError where another process runs this sweep, LaunchError where the launcher
        broke off, and KeyboardInterrupt also for SIGTERM.
        """
        with self._alone():
            left = [job for job in self.manifest.jobs if self.job_folder(job).result() is None]
            for job in left:
                self.job_folder(job).forget_failure()
            if not left:
                return
            progress = Progress(console, self.folder, left, len(self.manifest.jobs))
            task = Task.of(self.folder, beside=self.settings.launcher != BASIC)
            with _terminated_as_interrupted(), progress.shown():
                try:
                    launching.launch(self.settings, left, task)
                except KeyboardInterrupt:
                    (self.folder / STOP_NAME).touch()  # for jobs in processes that live on
                    raise
                finally:
                    hands.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, the folder is this sweep's alone, and its sweep.json is there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        require_writable(self.folder / NAME, "--out")
        refusal = f"{self.folder}: a sweep runs there already; wait for it, or end it"
        with held_at_once(self.folder / LOCK_NAME, refusal):
            (self.folder / STOP_NAME).unlink(missing_ok=True)
            if not self.resumed:
                self.manifest.write(self.folder)
            yield


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, as ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
