"""A timeline: what a step did and when, on tracks of its own, as a trace viewer shows it.

The executors tell `Lanes.timeline` of copies, computations and waits as they come. Mostly that is
a `Timeline`, which forgets at once; while a step is profiled it is a `Recording`. What the device
does is timed by marks in its lanes, what the host does by its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residency.runtime.lanes import Lanes, Mark

PROCESS = 5_000_000  # no operating system gives a process this id, and no device has it


class Track(IntEnum):
    """The thread ids of a trace, from the top down. Spans of one track nest, or follow in turn."""

    STEPS = 1
    COMPUTE = 2
    STALLS = 3
    COPIES = 4
    HOST_EXPERTS = 5
    WAITS = 6
    POLICY = 7


TRACK_NAMES = {
    Track.STEPS: "step and layers, as the host issues them",
    Track.COMPUTE: "compute: experts",
    Track.STALLS: "compute waits for copies",
    Track.COPIES: "copies",
    Track.HOST_EXPERTS: "host experts",
    Track.WAITS: "host waits for routers, plans",
    Track.POLICY: "policy: admission, touch",
}
_NOTHING = nullcontext()


class Timeline:
    """Forgets what it is told."""

    def during(self, track: Track, name: str, **args: Any) -> AbstractContextManager[None]:
        """The host does it inside, by its clock."""
        return _NOTHING

    def computing(
        self, name: str, track: Track = Track.COMPUTE, **args: Any
    ) -> AbstractContextManager[None]:
        """Work of the compute lane is issued inside."""
        return _NOTHING

    def copied(self, copy: Mark, name: str, **args: Any) -> None:
        """`copy` lies behind copies of `Lane.copying`."""


@dataclass(frozen=True)
class _Span:
    track: Track
    name: str
    begin: Mark
    end: Mark
    args: dict[str, Any]


class Recording(Timeline):
    """Writes down spans from now on. `lanes`: whose work is timed, and who tells of it."""

    def __init__(self, lanes: Lanes) -> None:
        lanes.synchronize()
        self._lanes = lanes
        self._zero = lanes.mark(timed=True)
        lanes.synchronize()
        self.begin_s = time.perf_counter()  # the host's time of the mark
        self._spans: list[_Span] = []
        self._host: list[tuple[Track, str, float, float, dict[str, Any]]] = []

    @contextmanager
    def during(self, track: Track, name: str, **args: Any) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self._host.append((track, name, begin_s, time.perf_counter(), args))

    @contextmanager
    def computing(self, name: str, track: Track = Track.COMPUTE, **args: Any) -> Iterator[None]:
        begin = self._lanes.mark(timed=True)
        yield
        self._spans.append(_Span(track, name, begin, self._lanes.mark(timed=True), args))

    def copied(self, copy: Mark, name: str, **args: Any) -> None:
        assert copy.begin is not None, "the copies were issued outside of Lane.copying"
        self._spans.append(_Span(Track.COPIES, name, copy.begin, copy, args))

    def events(self) -> Iterator[dict[str, Any]]:
        """Complete events of the Chrome trace format, ts and dur in us of `time.perf_counter`.

        Waits for the device.
        """
        for track, name, begin_s, end_s, args in self._host:
            yield _event(track, name, begin_s, end_s, args)
        for span in self._spans:
            begin_s, end_s = (
                self.begin_s + self._zero.until(mark) for mark in (span.begin, span.end)
            )
            yield _event(span.track, span.name, begin_s, end_s, span.args)


def _event(
    track: Track, name: str, begin_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    if name == "layer":
        name = f"layer {args['layer']}"
    elif "experts" in args or "rows" in args:
        count = len(args["experts"] if "experts" in args else args["rows"])
        name = f"{name}: {count} expert{'s' if count != 1 else ''}"
    return {
        "ph": "X",
        "cat": "residency",
        "name": name,
        "pid": PROCESS,
        "tid": int(track),
        "ts": begin_s * 1e6,
        "dur": (end_s - begin_s) * 1e6,
        "args": args,
    }


def track_metadata() -> Iterator[dict[str, Any]]:
    """The names of the process and of its tracks, and their order."""
    yield _metadata("process_name", 0, name="residency")
    yield _metadata("process_sort_index", 0, sort_index=-1)
    for track, name in TRACK_NAMES.items():
        yield _metadata("thread_name", track, name=name)
        yield _metadata("thread_sort_index", track, sort_index=int(track))


def _metadata(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": int(tid), "ts": 0, "args": args}
