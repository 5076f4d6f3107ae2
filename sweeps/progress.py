"""What runs, what is done and what is left, while a sweep runs: read from the jobs' folders."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from residency.sweeps.figures import Figures
from residency.sweeps.jobs import JobFolder, State
from residency.sweeps.manifest import Job

LOOK_S = 0.5
MOST_SHOWN = 8  # running jobs


class Progress:
    """Follows jobs. Each that ends is a line; what runs is drawn below, where a person looks."""

    def __init__(self, console: Console, folder: Path, left: Sequence[Job], total: int) -> None:
        """left: the jobs that this sweep runs now, of `total`."""
        self._console = console
        self._folder = folder
        self._left = {job.number: job for job in left}
        self._running: list[tuple[Job, str]] = []
        self._total = total
        self._done = total - len(left)
        self._failed = self._ended = 0
        self._began = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the display follows what happens."""
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), daemon=True)
        live = Live(
            console=self._console,
            get_renderable=self._drawn,
            transient=True,
            refresh_per_second=4,
        )
        done = f", {self._done} of them done" if self._done else ""
        self._console.print(Text(f"{self._total} jobs{done}, in {self._folder}"), soft_wrap=True)
        try:
            if self._console.is_terminal:
                live.start()
            watcher.start()
            yield
        finally:
            over.set()
            watcher.join()
            live.stop()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            self._look()
        self._look()

    def _look(self) -> None:
        running = []
        for job in list(self._left.values()):
            folder = JobFolder(self._folder / job.folder)
            state = folder.state
            if state in (State.DONE, State.FAILED):
                self._end(job, folder, state)
            elif state is State.RUNNING:
                running.append((job, (folder.running() or {}).get("told", "")))
        self._running = running

    def _end(self, job: Job, folder: JobFolder, state: State) -> None:
        del self._left[job.number]
        self._ended += 1
        if state is State.DONE:
            self._done += 1
            words = in_words(Figures.of(folder.result() or {}))
        else:
            self._failed += 1
            words = (folder.failure() or {}).get("error", "")
        count = f"[{self._done + self._failed}/{self._total}]"
        line = Text(f"{count} {state}: {job.title}: {words}")
        self._console.print(line, soft_wrap=True)

    def _drawn(self) -> Group:
        lines = [f"  {job.title}: {told}" for job, told in self._running[:MOST_SHOWN]]
        if (more := len(self._running) - MOST_SHOWN) > 0:
            lines.append(f"  and {more} more")
        counts = (
            f"running {len(self._running)}, done {self._done}, failed {self._failed}, "
            f"left {len(self._left) - len(self._running)}{self._time_left()}"
        )
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in [*lines, counts]))

    def _time_left(self) -> str:
        if not self._ended:
            return ""
        seconds = (time.monotonic() - self._began) / self._ended * len(self._left)
        return f"; about {seconds / 60:.0f} min" if seconds > 90 else f"; about {seconds:.0f} s"


def in_words(figures: Figures) -> str:
    """A job's numbers in a line."""
    parts = []
    if figures.ttft_s:
        tokens, seconds = figures.ttft_s[-1]
        parts.append(f"TTFT of {tokens} tokens {seconds * 1e3:.1f} ms")
    if figures.decode_s is not None:
        parts.append(f"decode {figures.decode_s * 1e3:.2f} ms")
    if figures.hit_rate is not None:
        parts.append(f"{figures.hit_rate:.1%} hits")
    return ", ".join(parts) or "whole"
