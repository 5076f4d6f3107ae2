"""Lanes: streams and events of one device, which on the CPU are nothing at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from residency.runtime.timeline import Timeline, Track


class Mark:
    """A point in a lane's work that another lane can wait for. No event on the CPU: work is done.

    at: on the CPU, the time of the point. begin: where the copies that it ends began, if any.
    """

    def __init__(self, event: torch.cuda.Event | None = None, at: float = 0.0) -> None:
        self.event = event
        self.at = at
        self.begin: Mark | None = None

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def until(self, later: Mark) -> float:
        """Seconds from this mark to another, both timed. Waits for the other; 0 for no time."""
        if self.event is None or later.event is None:
            return later.at - self.at
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3

    def seconds(self) -> float:
        """How long the copies before this mark of `Lane.copying` took. Waits for them."""
        return 0.0 if self.begin is None else self.begin.until(self)


class Reading:
    """A tensor on its way from the device to the host."""

    def __init__(self, tensor: torch.Tensor, arrival: Mark) -> None:
        self._tensor = tensor
        self.arrival = arrival

    def value(self) -> torch.Tensor:
        """On the host; waits until it is there."""
        if self.arrival.event is not None:
            self.arrival.event.synchronize()
        return self._tensor


class Lane:
    """A stream for copies of one kind, beside the compute lane; nothing at all on the CPU."""

    def __init__(self, device: torch.device, marks: list[Mark]) -> None:
        """marks: where the mark of each `copying` is written down."""
        self._marks = marks
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self, *after: Mark) -> Iterator[Mark]:
        """Copies are issued inside, behind `after`; the yielded mark lies behind them."""
        done, stream = Mark(), self.stream
        self._marks.append(done)
        if stream is None:
            done.begin = Mark(at=time.perf_counter())
            yield done
            done.at = time.perf_counter()
            return
        for mark in after:
            if mark.event is not None:
                stream.wait_event(mark.event)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield done
        end.record(stream)
        done.begin, done.event = Mark(begin), end

    def current(self) -> AbstractContextManager[object]:
        """Inside, torch works on this lane."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @property
    def handle(self) -> int:
        """The stream as the driver knows it; the device has to have one."""
        assert self.stream is not None, "the CPU has no streams"
        handle: int = self.stream.cuda_stream
        return handle


class Lanes:
    """The compute lane (the current stream) of one device, and its lanes for copies.

    link: over the link. moves: within the device, which need not hold up the link.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: list[Mark] = []
        self.link, self.moves = (Lane(device, self._copies) for _ in range(2))
        self._compute: torch.cuda.Stream | None = None
        self.timeline = Timeline()  # hears of copies, computations and waits
        self.copies_beside = device.type == "cuda"  # whether copies run beside the compute
        self.begin()

    def begin(self) -> None:
        """The current stream is the compute lane from now on; to ask at each mark takes longer
        than the mark.
        """
        if self.device.type == "cuda":
            self._compute = torch.cuda.current_stream(self.device)

    def mark(self, timed: bool = False) -> Mark:
        """A mark behind all work issued so far on the compute lane."""
        if self._compute is None:
            return Mark(at=time.perf_counter())
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self._compute)
        return Mark(event)

    def wait(self, mark: Mark) -> None:
        """The compute lane goes on only after `mark`."""
        with self.timeline.computing("wait for a copy", Track.STALLS):
            if mark.event is not None and self._compute is not None:
                self._compute.wait_event(mark.event)

    def reading(self, tensor: torch.Tensor) -> Reading:
        """Start to read a tensor behind all work issued so far on the compute lane, so that the
        host need not wait for what is issued after it. The reading's arrival is timed.
        """
        if tensor.device.type != "cuda":
            return Reading(tensor, self.mark())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return Reading(host, self.mark(timed=True))

    def streams(self) -> dict[str, torch.cuda.Stream]:
        """By what runs on them; none on the CPU."""
        if self.device.type != "cuda":
            return {}
        lanes = {"copies": self.link.stream, "moves within the device": self.moves.stream}
        compute = torch.cuda.current_stream(self.device)
        return {"compute": compute} | {n: stream for n, stream in lanes.items() if stream}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take_copy_seconds(self) -> float:
        """Seconds that copies took since the last call. Synchronises."""
        self.synchronize()
        seconds = sum(mark.seconds() for mark in self._copies)
        self._copies.clear()
        return seconds
