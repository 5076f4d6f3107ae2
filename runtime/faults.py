"""Faults: what the machine refuses in the middle of work, told in one line by what was under way.

Work that can fail so stands at a named point. Memory that ran out becomes a CapacityError with the
numbers and the keys to change, a device or a copy that failed a DeviceError; all else passes.
Tests arm a point to see what its failure does; one that is not armed costs a look into an empty
dictionary.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from residency.policies.errors import CapacityError, DeviceError, ResidencyError
from residency.runtime.free_memory import GIB, device_use

if TYPE_CHECKING:
    from residency.runtime.banks import Banks
    from residency.runtime.memory import MemoryPlan


class Point(StrEnum):
    """What is under way, in words that a message can hold."""

    LOAD = "loading the model"
    POOL = "taking slots and staging"
    PREFILL = "prefill"
    DECODE = "decode"
    CAPTURE = "capturing the decode step as a graph"
    COPY = "copying experts"
    GENERATE = "generating"


MENDS = {
    Point.LOAD: "choose a smaller model, or model.format with fewer bytes",
    Point.POOL: "lower cache.slots or prefill.ring, or raise prefill.groups",
    Point.PREFILL: "lower prefill.chunk_tokens, cache.slots or model.context",
    Point.DECODE: "lower cache.slots or model.context",
    Point.CAPTURE: "lower cache.slots or model.context, so that the graph has room",
    Point.COPY: "lower cache.slots",
    Point.GENERATE: "lower cache.slots, prefill.chunk_tokens or model.context",
}
# How torch, and what it calls, say it where they have no class for it.
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
DEVICE = re.compile(r"\b(CUDA|CUBLAS|CUDNN|cu[A-Z]\w+)\b.*error|\bCU(BLAS|DNN)_STATUS_")
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]?i?B)", re.IGNORECASE)

RESTART = "nothing can run in this process any more; start it again"

_armed: dict[Point, Callable[[], None]] = {}


@contextmanager
def armed(point: Point, action: Callable[[], None]) -> Iterator[None]:
    """Inside, whoever comes to the point does `action` first. For tests alone."""
    _armed[point] = action
    try:
        yield
    finally:
        del _armed[point]


class Work:
    """Around work at a point.

    plan: the memory that was planned, for the message; None leaves memory to the work around it.
    """

    def __init__(
        self, point: Point, plan: MemoryPlan | None = None, device: torch.device | None = None
    ) -> None:
        self.point = point
        self.plan = plan
        self.device = device

    def __enter__(self) -> Work:
        if _armed and (action := _armed.get(self.point)):
            try:
                action()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ResidencyError):
            return
        if ran_out(error):
            if self.plan is not None:
                text = self._ran_out(self.plan, str(error))
                # What its frames hold is what there is too little memory for.
                traceback.clear_frames(error.__traceback__)
                raise CapacityError(text) from error
        elif _is_the_devices(error) or (
            self.point is Point.COPY and isinstance(error, RuntimeError)
        ):
            raise DeviceError(f"the device failed at {self.point}: {_first_line(error)}") from error

    def _ran_out(self, plan: MemoryPlan, text: str) -> str:
        where = "host" if self.device is None or self.device.type == "cpu" else "device"
        asked = ASKED.search(text)
        more = f", which asked for {_size(*asked.groups())} more" if asked else ""
        used = f"; {use}" if (use := device_use(self.device)) else ""
        return (
            f"{where} memory ran out at {self.point}{more} (planned: {plan.terms()}{used}); "
            f"{MENDS[self.point]}"
        )


class Health:
    """Whether steps can still run on a device; if not, why. lost: the reason, empty if they can."""

    def __init__(self) -> None:
        self.lost = ""

    def require(self) -> None:
        """Raises DeviceError where nothing can run any more."""
        if self.lost:
            raise DeviceError(self.lost)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Around what undoes a step that broke off; DeviceError where the device fails at that."""
        self.lost = f"a step broke off and was not undone: {RESTART}"
        try:
            yield
        except RuntimeError as error:
            self.lost = f"the device answers no more ({_first_line(error)}): {RESTART}"
            raise DeviceError(self.lost) from error
        self.lost = ""

    def require_same(self, banks: Banks) -> None:
        """Raises DeviceError for banks that differ from what was loaded, if that is verified."""
        if changed := banks.changed():
            layer, expert = changed[0]
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self.lost = (
                f"the bank of layer {layer}, expert {expert}{more} no longer holds what was loaded:"
                " memory is faulty, or something in this process wrote there; what was generated "
                "is dropped; start again, and test the memory if it happens twice"
            )
            raise DeviceError(self.lost)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def ran_out(error: BaseException | None) -> bool:
    """Whether the error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def _is_the_devices(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and DEVICE.search(str(error)) is not None


def _size(number: str, unit: str) -> str:
    if unit.lower() != "bytes":
        return f"{number} {unit}"
    return f"{float(number) / GIB:.2f} GiB"
