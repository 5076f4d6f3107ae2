"""The folder of one job. What lies there is its state, whoever runs it: nothing else is kept."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from residency.policies.errors import OutputError, one_line
from residency.runtime.results import RESULT_NAME, write_whole
from residency.sweeps.locks import held, is_held

RUNNING_NAME, FAILURE_NAME = "running.json", "failure.json"
VERSION, KIND = 1, "failure"


class State(StrEnum):
    """A job is done once its result is whole, and waits after an attempt that was cut off."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class JobFolder:
    """Reads and writes the state of one job. running.json: locked by who runs the job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def state(self) -> State:
        if self.result() is not None:
            return State.DONE
        if is_held(self.path / RUNNING_NAME):
            return State.RUNNING
        return State.FAILED if (self.path / FAILURE_NAME).exists() else State.WAITING

    def result(self) -> dict[str, Any] | None:
        """What result.json holds; None unless it is whole."""
        return _read(self.path / RESULT_NAME)

    def failure(self) -> dict[str, Any] | None:
        return _read(self.path / FAILURE_NAME)

    def running(self) -> dict[str, Any] | None:
        """`pid`, `host`, `started` (seconds since 1970) and `told`, its last word."""
        return _read(self.path / RUNNING_NAME)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, the job is this process's; waits for one that runs it already."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / RUNNING_NAME
        with held(file):
            self._started = time.time()
            self.tell("starts")
            try:
                yield
            finally:
                file.unlink(missing_ok=True)

    def tell(self, line: str) -> None:
        """Within `claimed`: what the job does now. In place, for the lock is on this very file."""
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "told": line,
        }
        (self.path / RUNNING_NAME).write_text(json.dumps(about) + "\n")

    def fail(self, error: str, detail: str) -> None:
        """Leave failure.json. Raises OutputError."""
        content = {"version": VERSION, "kind": KIND, "error": one_line(error), "detail": detail}
        file = self.path / FAILURE_NAME
        write_whole({file: json.dumps(content, indent=1).encode() + b"\n"}, "--out")

    def forget_failure(self) -> None:
        """Raises OutputError."""
        try:
            (self.path / FAILURE_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror})") from error


def _read(file: Path) -> dict[str, Any] | None:
    """The object in `file`; None where there is no file, or a part of one."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
