"""Copies: the link pinned and pageable, the gather of scattered experts, the device's own copies.

With device=cpu the link is a copy within memory and the gather is its torch definition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from residency.runtime.host_memory import empty_rows
from residency.runtime.lanes import Lanes
from residency.runtime.machine.busy import busy_cpu
from residency.runtime.machine.measurement import (
    BYTES_S,
    DEVICE_COPY,
    GATHER,
    GATHER_BUSY,
    GATHER_EIGHT,
    GATHER_ONE,
    LINK,
    LINK_BUSY,
    LINK_PAGEABLE,
    Measurement,
    rates,
)
from residency.runtime.machine.sizes import Effort
from residency.runtime.pinning import Pinned

ROW_BYTES = 4 << 20  # of an expert that is gathered
ROWS_COPIED = 16  # of one copy, as a group of a stream has


def pageable_copy(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """From memory that is not pinned."""
    rows = _bank(effort)
    yield _linear(LINK_PAGEABLE, "copies from pageable host memory", rows, device, effort)


def pinned_copies(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """From memory that is pinned as banks are; on the CPU from memory as it is."""
    rows = _bank(effort)
    pinned = Pinned([rows], None) if device.type == "cuda" else None
    try:
        kind = "from pinned host memory" if pinned is not None else "within host memory"
        yield _linear(LINK, f"large copies {kind}", rows, device, effort)
        with busy_cpu() as readers:
            what = f"the same while other cores read memory ({readers})"
            yield _linear(LINK_BUSY, what, rows, device, effort)
    finally:
        if pinned is not None:
            torch.cuda.synchronize(device)
            pinned.release()


def gathers(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """Scattered experts by a list that only the device knows."""
    rows = _bank(effort)
    pinned = Pinned([rows], None) if device.type == "cuda" else None
    try:
        for name, number in ((GATHER_ONE, 1), (GATHER_EIGHT, 8), (GATHER, 64)):
            yield _gathered(name, "", rows, number, device, effort)
        with busy_cpu() as readers:
            beside = f" while other cores read memory ({readers})"
            yield _gathered(GATHER_BUSY, beside, rows, 64, device, effort)
    finally:
        if pinned is not None:
            torch.cuda.synchronize(device)
            pinned.release()


def device_copies(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """Bytes read; as many are written."""
    source = torch.zeros(effort.device_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = rates(lambda: target.copy_(source), source.nbytes, device, effort.repeats)
    yield Measurement.of(DEVICE_COPY, "copies within the device's memory", BYTES_S, found)


@contextmanager
def link_under_load(device: torch.device) -> Iterator[None]:
    """Inside, the link copies from a thread of its own, as it would beside experts on the host."""
    rows = empty_rows(2 * ROWS_COPIED, ROW_BYTES).fill_(1)
    pinned = Pinned([rows], None) if device.type == "cuda" else None
    target = torch.empty(ROWS_COPIED, ROW_BYTES, dtype=torch.uint8, device=device)
    lanes, stop = Lanes(device), threading.Event()

    def copy() -> None:
        while not stop.is_set():
            with lanes.link.copying(), lanes.link.current():
                for begin in (0, ROWS_COPIED):
                    target.copy_(rows[begin : begin + ROWS_COPIED], non_blocking=True)
            lanes.synchronize()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if pinned is not None:
            pinned.release()


def _bank(effort: Effort) -> torch.Tensor:
    """Rows that are there: every page is written."""
    return empty_rows(max(2, effort.bank_bytes // ROW_BYTES), ROW_BYTES).fill_(1)


def _linear(
    name: str, what: str, rows: torch.Tensor, device: torch.device, effort: Effort
) -> Measurement:
    size = min(ROWS_COPIED, len(rows))
    target = torch.empty(size, ROW_BYTES, dtype=torch.uint8, device=device)
    begins = range(0, len(rows) - size + 1, size)

    def copy() -> None:
        for begin in begins:
            target.copy_(rows[begin : begin + size], non_blocking=True)

    num_bytes = len(begins) * target.nbytes
    return Measurement.of(name, what, BYTES_S, rates(copy, num_bytes, device, effort.repeats))


def _gathered(
    name: str, beside: str, rows: torch.Tensor, number: int, device: torch.device, effort: Effort
) -> Measurement:
    number = min(number, len(rows))
    what = f"{number} scattered rows of 4 MiB at a time{beside}"
    turns = max(1, min(len(rows) // number, 32))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    experts = order[: turns * number].int().to(device).view(turns, number)
    target = torch.empty(number, ROW_BYTES, dtype=torch.uint8, device=device)
    places = torch.arange(number, dtype=torch.int32, device=device)
    count = torch.tensor([number], dtype=torch.int32, device=device)
    gather = _gather_of(device)

    def work() -> None:
        for turn in range(turns):
            gather(rows, target, experts[turn], places, count)

    num_bytes = turns * target.nbytes
    return Measurement.of(name, what, BYTES_S, rates(work, num_bytes, device, effort.repeats))


def _gather_of(device: torch.device) -> Callable[..., None]:
    """The kernel where a device reads host memory by itself, else the loop of a host's copies."""
    if device.type == "cuda":
        from residency.runtime.kernels.gather import launch_gather

        return launch_gather
    return _copy_rows


def _copy_rows(
    bank: torch.Tensor,
    rows: torch.Tensor,
    copy_expert: torch.Tensor,
    copy_slot: torch.Tensor,
    num_copies: torch.Tensor,
) -> None:
    """What `gather` of the kernels defines, expert by expert, as the runtime's transfers do it."""
    for expert, slot in zip(copy_expert.tolist(), copy_slot.tolist(), strict=True):
        rows[slot].copy_(bank[expert])
