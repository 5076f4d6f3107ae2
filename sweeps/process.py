"""The other end of a worker: starts it, hands it jobs, and notices when it is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from residency.policies.errors import ResidencyError
from residency.sweeps.lines import Closed, Lines, Message, Silent

LISTEN_S = 0.5  # between two questions whether the job is still wanted
CLOSE_S = 20.0
TAIL = 4000  # characters of what a worker printed


class JobError(ResidencyError):
    """A job that failed. detail: the worker's traceback, or the end of what it printed."""

    def __init__(self, text: str, detail: str) -> None:
        super().__init__(text)
        self.detail = detail


class Unwanted(Exception):
    """The sweep was stopped while the job ran."""


class WorkerProcess:
    """One spawned worker. Never forked: a fork would share what its parent has of CUDA."""

    def __init__(self, cwd: Path) -> None:
        """Raises JobError where it cannot be started."""
        own, other = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", __package__ + ".worker", str(other.fileno())]
        try:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                cwd=cwd,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise JobError(f"a worker cannot be started in {cwd}: {error}", "") from error
        finally:
            other.close()
        self._lines = Lines(own)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, request: Message, told: Callable[[str], None], wanted: Callable[[], bool]) -> str:
        """Have one job run; gives the type of the device that ran it.

        told: hears what the job does. wanted: whether it is to go on. Raises JobError, and Unwanted
        where it is not, with the worker gone.
        """
        try:
            self._lines.send(request)
            while True:
                try:
                    answer = self._lines.receive(LISTEN_S)
                except Silent:
                    if not wanted():
                        self.kill()
                        raise Unwanted from None
                    continue
                if "told" in answer:
                    told(answer["told"])
                elif "failed" in answer:
                    failed: dict[str, Any] = answer["failed"]
                    raise JobError(failed["error"], failed["detail"])
                else:
                    return str(answer["done"])
        except Closed:
            raise JobError(*self._last_words()) from None

    def close(self) -> None:
        """Have it end; its memory is free afterwards."""
        try:
            self._lines.send({"last": True})
            self._process.wait(CLOSE_S)
        except (Closed, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._printed.close()

    def _last_words(self) -> tuple[str, str]:
        status = self._process.wait()
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")[-TAIL:]
        if status >= 0:
            return f"the worker ended with status {status}", printed
        name = signal.Signals(-status).name
        hint = ": the system may have run out of memory" if name == "SIGKILL" else ""
        return f"the worker was ended by {name}{hint}", printed
