"""The spawned process that runs jobs: loads a model once, and stands a fresh runtime for each job.

Started as `python -m residency.sweeps.worker DESCRIPTOR PARENT`, talks over the socket DESCRIPTOR,
and ends when its parent is gone. It exits by itself after an error that nobody foresaw, since what
that left behind could change the numbers of the next job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from residency.conf import build_engine, compose
from residency.conf.compose import Config
from residency.conf.outcome import write_outcome
from residency.policies.errors import ConfigError, ResidencyError
from residency.runtime.engine import Engine
from residency.runtime.results import ResultFolder
from residency.runtime.traces.writing import save
from residency.sweeps.lines import Closed, Lines, Message
from residency.sweeps.turns import take_turn

PR_SET_PDEATHSIG = 1
ORPHANED = 3  # exit status of a worker whose parent is gone
SEED = 0  # of what no config seeds
LOADING_S = 0.5  # between two lines of how far loading is


class Bench:
    """Runs jobs that share a model and a device."""

    def __init__(self, costs: Path, told: Callable[[str], None]) -> None:
        """costs: the sweep's copies of cost profiles, which all its jobs begin with."""
        self._costs = costs
        self._told = told
        self._engine: Engine | None = None

    def run(self, overrides: list[str], folder: Path, routes: Path | None) -> str:
        """Run one job and write its result; gives the device's type.

        routes: where its decode's routes are to be, recorded first where they are not yet: a
        recording changes what is timed.
        """
        config = compose(overrides)
        if routes is not None and not routes.exists():
            self._record(config, routes)
        engine = self._fresh(config)
        report = config.workload.run(engine, self._listener(config))
        write_outcome(config, report, ResultFolder(folder, force=True))
        return engine.device.type

    def _record(self, config: Config, file: Path) -> None:
        """A job can do without: what goes wrong here is said when it happens to the job itself."""
        self._told("records routes")
        try:
            engine = self._fresh(config)
            recorder = engine.record_routes()
            config.workload.record(engine)
            file.parent.mkdir(parents=True, exist_ok=True)
            about = {"model": config.model.name, "workload": config.workload.name}
            save(recorder.trace(about), file, "routes")
        except ResidencyError as error:
            self._told(f"routes were not recorded: {error}")

    def _fresh(self, config: Config) -> Engine:
        """The engine as if it had just been loaded for `config`. Raises ResidencyError."""
        if self._engine is None:
            device = config.device.resolve()
            if device.type == "cuda":
                take_turn(device.index or 0, self._told)
            self._engine = build_engine(config, self._loading(), fixed_costs=self._costs)
        else:
            for conflict in config.conflicts():
                raise ConfigError(str(conflict))
            workload = config.workload
            self._engine.rebuild(config.policies, workload.batch, workload.snapshots)
        gc.collect()
        torch.manual_seed(SEED)
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._engine.device)
        return self._engine

    def _listener(self, config: Config) -> Callable[[str], None] | None:
        """Of lines; the pieces of text that a run tells are not for a sweep."""
        self._told("runs")
        return self._told if config.workload.command == "bench" else None

    def _loading(self) -> Callable[[str, int, int], None]:
        last = [0.0]

        def progress(what: str, done: int, total: int) -> None:
            if (now := time.monotonic()) - last[0] > LOADING_S and total:
                last[0] = now
                self._told(f"loads {what}: {done / total:.0%}")

        return progress


def serve(lines: Lines, requests: queue.SimpleQueue[Message]) -> None:
    """Answer requests, each with `done` or `failed`, until one says that it was the last."""
    bench: Bench | None = None
    while "last" not in (request := requests.get()):
        if bench is None:
            bench = Bench(Path(request["costs"]), lambda line: lines.send({"told": line}))
        try:
            routes = request["routes"]
            device = bench.run(
                request["overrides"], Path(request["folder"]), Path(routes) if routes else None
            )
            lines.send({"done": device})
        except ResidencyError as error:
            lines.send(_failed(error, str(error)))
        except Closed:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines() or [""]
            lines.send(_failed(error, text[0]))
            return


def _failed(error: Exception, text: str) -> Message:
    return {"failed": {"error": text, "detail": "".join(traceback.format_exception(error))}}


def _die_with(parent: int) -> None:
    """End with the parent, even when it is killed in the middle of a job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


def _listen(lines: Lines, requests: queue.SimpleQueue[Message]) -> None:
    for message in lines:
        requests.put(message)
    os._exit(ORPHANED)  # the main thread may be deep in a kernel


def main(words: list[str]) -> None:
    descriptor, parent = map(int, words)
    _die_with(parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the parent, who decides
    lines = Lines(socket.socket(fileno=descriptor))
    requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, requests), daemon=True).start()
    serve(lines, requests)
    sys.stdout.flush()
    os._exit(0)  # what a broken job left may hang in destructors


if __name__ == "__main__":
    main(sys.argv[1:])
