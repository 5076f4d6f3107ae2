"""A profile: one chunk of a prompt and one decode step, written down for a trace viewer.

Beside our own spans (`timeline`) it holds what torch.profiler saw: operators of the host, and on
CUDA every kernel and copy of every stream, those inside graphs included. Each step is a session
of the profiler's; a mark of known time in it brings its clock onto ours.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from residency.policies.step import Phase
from residency.runtime.lanes import Lanes
from residency.runtime.timeline import Recording, Timeline, Track, track_metadata

TRACE_NAME = "trace.json"
DECODE_STEP = 2  # on CUDA the first runs eagerly, the second is captured, this one is replayed
NOTE = "profiled: times are not comparable"
GAP_US = 1000.0  # between the steps of a trace
_CLOCK = "residency: clock"
_STREAM = "residency: "


class Unprofiled:
    """No step is written down."""

    @contextmanager
    def step(self, phase: Phase, taken: bool) -> Iterator[None]:
        """A step runs inside. taken: it is the one of its phase to write down."""
        yield

    def files(self) -> dict[str, bytes]:
        """What goes beside a result, by name."""
        return {}

    def notes(self) -> list[str]:
        """Lines for a report."""
        return []


class Profile(Unprofiled):
    """Writes down the steps that are taken; of each phase, the last one.

    streams: by their names in the trace; none on the CPU.
    """

    def __init__(self, lanes: Lanes, streams: Mapping[str, torch.cuda.Stream]) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its progress
        self._lanes = lanes
        self._streams = dict(streams)
        self._events: dict[Phase, list[dict[str, Any]]] = {}

    @contextmanager
    def step(self, phase: Phase, taken: bool) -> Iterator[None]:
        if not taken:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if self._lanes.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            clock_s = time.perf_counter()
            with record_function(_CLOCK):
                pass
            self._mark_streams()
            recording = self._lanes.timeline = Recording(self._lanes)
            try:
                with recording.during(Track.STEPS, str(phase)):
                    yield
                    self._lanes.synchronize()
            finally:
                self._lanes.timeline = Timeline()
        seen = _aligned(_exported(profiler), clock_s)
        self._events[phase] = [*recording.events(), *_shown(seen, recording.begin_s)]

    def _mark_streams(self) -> None:
        """A little work on each stream, by which the profiler tells which of its numbers it has."""
        for name, stream in self._streams.items():
            with torch.cuda.stream(stream), record_function(f"{_STREAM}{name}"):
                torch.zeros(1, device=self._lanes.device)
        self._lanes.synchronize()

    def trace(self) -> dict[str, Any]:
        """The trace in Chrome's format, which ui.perfetto.dev opens.

        The steps follow at once: what lay between them would fill the screen with nothing.
        """
        names: dict[str, None] = {}
        moved = []
        begin = 0.0
        for events in self._events.values():
            first = min(event["ts"] for event in events if event["ph"] == "X")
            for event in events:
                if event["ph"] == "M":
                    names[json.dumps(event)] = None
                else:
                    moved.append(event | {"ts": event["ts"] - first + begin})
            begin = GAP_US + max(e["ts"] + e["dur"] for e in moved if e["ph"] == "X")
        shown = [*track_metadata(), *map(json.loads, names), *moved]
        return {"displayTimeUnit": "ms", "traceEvents": shown}

    def files(self) -> dict[str, bytes]:
        return {TRACE_NAME: json.dumps(self.trace()).encode()}

    def notes(self) -> list[str]:
        """Lines for a report."""
        taken = " and ".join(
            {Phase.PREFILL: "a chunk of the prompt", Phase.DECODE: "a decode step"}[phase]
            for phase in self._events
        )
        return [f"{NOTE}; {TRACE_NAME} has {taken or 'no step'}"]


def _exported(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TRACE_NAME
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return [e for e in events if e["ph"] in "XMsf" and e.get("pid") not in ("Spans", "Traces")]


def _aligned(events: list[dict[str, Any]], clock_s: float) -> Iterator[dict[str, Any]]:
    """The events by the host's clock, which said `clock_s` at the mark."""
    at = next((e["ts"] for e in events if e["name"] == _CLOCK and e["ph"] == "X"), None)
    if at is None:
        return
    for event in events:
        if event["ph"] == "M":
            yield event | {"ts": 0}
        elif event["ts"] >= at and event["name"] != _CLOCK:
            yield event | {"ts": clock_s * 1e6 + event["ts"] - at}


def _shown(events: Iterator[dict[str, Any]], begin_s: float) -> Iterator[dict[str, Any]]:
    """The events since `begin_s`; streams have our names, by the marks that came before."""
    seen = list(events)
    streams = {
        (event["pid"], event["tid"]): event["name"].removeprefix(_STREAM)
        for event in seen
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith(_STREAM)
    }
    since = [event for event in seen if event["ph"] != "M" and event["ts"] >= begin_s * 1e6]
    places = {event["pid"] for event in since}  # torch names devices that did nothing, too
    for event in seen:
        if event["ph"] == "M" and event["pid"] in places:
            yield _renamed(event, streams.get((event["pid"], event.get("tid"))))
    yield from since


def _renamed(event: dict[str, Any], stream: str | None) -> dict[str, Any]:
    """Processes, which torch names all the same, after what runs in them, and streams by ours."""
    if event["name"] == "process_name":
        host = event["pid"] == os.getpid()
        name = "torch: operators of the host" if host else f"torch: GPU {event['pid']}, by stream"
    elif event["name"] == "thread_name" and stream is not None:
        name = f"{stream} ({event['args']['name'].strip()})"
    else:
        return event
    return event | {"args": {"name": name}}
