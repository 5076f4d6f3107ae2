"""Lanes: streams and events of one device, which on the CPU are nothing at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Mark:
    """A point in a lane's work that another lane can wait for. None on the CPU: work is done.

    begin: where the copies that it ends began. copy_s: what they took, on the CPU.
    """

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event
        self.begin: torch.cuda.Event | None = None
        self.copy_s = 0.0

    def seconds(self) -> float:
        """How long the copies before this mark of `Lanes.copying` took. Waits for them."""
        if self.event is None or self.begin is None:
            return self.copy_s
        self.event.synchronize()
        return float(self.begin.elapsed_time(self.event)) / 1e3


class Reading:
    """A tensor on its way from the device to the host."""

    def __init__(self, tensor: torch.Tensor, arrival: Mark) -> None:
        self._tensor = tensor
        self._arrival = arrival

    def value(self) -> torch.Tensor:
        """On the host; waits until it is there."""
        if self._arrival.event is not None:
            self._arrival.event.synchronize()
        return self._tensor


class Lanes:
    """The compute lane (the current stream) and the copy lane of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copy = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._copy_s = 0.0

    def mark(self) -> Mark:
        """A mark behind all work issued so far on the compute lane."""
        if self._copy is None:
            return Mark()
        return Mark(torch.cuda.current_stream(self.device).record_event())

    def wait(self, mark: Mark) -> None:
        """The compute lane goes on only after `mark`."""
        if mark.event is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def reading(self, tensor: torch.Tensor) -> Reading:
        """Start to read a tensor behind all work issued so far on the compute lane, so that the
        host need not wait for what is issued after it.
        """
        if tensor.device.type != "cuda":
            return Reading(tensor, Mark())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return Reading(host, self.mark())

    @contextmanager
    def copying(self, *after: Mark) -> Iterator[Mark]:
        """Issue copies on the copy lane, behind `after`; the yielded mark lies behind them."""
        done = Mark()
        if self._copy is None:
            start = time.perf_counter()
            yield done
            done.copy_s = time.perf_counter() - start
            self._copy_s += done.copy_s
            return
        for mark in after:
            if mark.event is not None:
                self._copy.wait_event(mark.event)
        with torch.cuda.stream(self._copy):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self._copy)
            yield done
            end.record(self._copy)
        done.begin, done.event = begin, end
        self._timed.append((begin, end))

    def synchronize(self) -> None:
        if self._copy is not None:
            torch.cuda.synchronize(self.device)

    def take_copy_seconds(self) -> float:
        """Seconds that the copy lane was busy since the last call. Synchronises."""
        self.synchronize()
        events, self._timed = self._timed, []
        seconds, self._copy_s = self._copy_s, 0.0
        for begin, end in events:
            seconds += float(begin.elapsed_time(end)) / 1e3
        return seconds
