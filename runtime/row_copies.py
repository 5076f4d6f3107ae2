"""Row copies: many rows of one tensor to rows of another, issued together on a lane.

A layer of a chunk copies dozens of scattered rows. One by one, each takes a call of the host and a
pause of the link; the driver takes them all in one call, and a kernel does for rows that are on the
device already.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch

from residency.runtime.lanes import Lane

SUCCESS = 0
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
WORD = torch.int64

Batch = Callable[["array[int]", "array[int]", "array[int]", int], int]


class RowCopies(Protocol):
    """Copies into the rows of one device."""

    def issue(self, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each of the rows `sources` of origin, uint8 [N, row_bytes], to one of `targets`."""


@dataclass(frozen=True)
class Run:
    """Consecutive rows that go to consecutive rows: one copy."""

    source: int
    target: int
    length: int


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[Run]:
    """Cut (source, target) pairs into runs that are consecutive on both sides."""
    start = 0
    for end in range(1, len(sources) + 1):
        consecutive = (
            end < len(sources)
            and sources[end] == sources[end - 1] + 1
            and targets[end] == targets[end - 1] + 1
        )
        if not consecutive:
            yield Run(sources[start], targets[start], end - start)
            start = end


class OneByOne:
    """A copy for each run of rows: on any device, from any memory."""

    def __init__(self, rows: torch.Tensor, lane: Lane) -> None:
        self._rows = rows
        self._lane = lane

    def issue(self, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        with self._lane.current():
            for run in runs(sources, targets):
                target = self._rows[run.target : run.target + run.length]
                target.copy_(origin[run.source : run.source + run.length], non_blocking=True)


class Batched:
    """One call of the driver for all of them, from pinned memory."""

    def __init__(self, rows: torch.Tensor, lane: Lane, batch: Batch) -> None:
        self._rows = rows
        self._lane = lane
        self._batch = batch

    def issue(self, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        row_bytes = self._rows.shape[1]
        first_source, first_target = origin.data_ptr(), self._rows.data_ptr()
        found = list(runs(sources, targets))
        if not found:
            return
        into = array("Q", [first_target + run.target * row_bytes for run in found])
        out_of = array("Q", [first_source + run.source * row_bytes for run in found])
        sizes = array("Q", [run.length * row_bytes for run in found])
        code = self._batch(into, out_of, sizes, self._lane.handle)
        if code != SUCCESS:
            raise RuntimeError(f"CUDA error {code}: {len(found)} copies were refused")


class ByKernel:
    """Within a device: a kernel that copies many rows at once."""

    def __init__(self, rows: torch.Tensor, lane: Lane) -> None:
        self._rows = rows
        self._lane = lane

    @cached_property
    def _words(self) -> tuple[torch.Tensor, ...]:
        """Each row, in words as wide as the kernel's fastest."""
        with torch.inference_mode(False):  # written in and out of it
            return self._rows.view(WORD).unbind(0)

    def issue(self, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert origin is self._rows, "rows are copied among themselves"
        if not sources:
            return
        words = self._words
        into, out_of = [words[row] for row in targets], [words[row] for row in sources]
        with self._lane.current():
            torch._foreach_copy_(into, out_of, non_blocking=True)


def over_the_link(rows: torch.Tensor, banks: Sequence[torch.Tensor], lane: Lane) -> RowCopies:
    """The fastest way from these banks into `rows`."""
    pinned = rows.device.type == "cuda" and all(bank.is_pinned() for bank in banks)
    if pinned and (batch := driver_batch(rows.device)) is not None:
        return Batched(rows, lane, batch)
    return OneByOne(rows, lane)


def within(rows: torch.Tensor, lane: Lane) -> RowCopies:
    """The fastest way among `rows`."""
    if rows.device.type == "cuda" and rows.shape[1] % WORD.itemsize == 0:
        return ByKernel(rows, lane)
    return OneByOne(rows, lane)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA's driver."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


@lru_cache
def driver_batch(device: torch.device) -> Batch | None:
    """cuMemcpyBatchAsync; None for a driver that has none in this form, as before CUDA 13."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
    function.restype = ctypes.c_int
    alike = _Attributes(order=IN_STREAM_ORDER)
    first = size(0)  # the one set of attributes holds from the first copy on

    def batch(into: array[int], out_of: array[int], sizes: array[int], stream: int) -> int:
        addresses = (each.buffer_info()[0] for each in (into, out_of, sizes))
        with torch.cuda.device(device):
            code: int = function(
                *addresses, len(into), ctypes.addressof(alike), ctypes.addressof(first), 1, stream
            )
        return code

    return batch
