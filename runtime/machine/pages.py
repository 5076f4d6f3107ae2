"""Pages: how fast host memory is pinned, as banks are after loading."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from residency.runtime.host_memory import empty_rows
from residency.runtime.machine.copies import ROW_BYTES
from residency.runtime.machine.measurement import BYTES_S, PIN, Measurement
from residency.runtime.machine.sizes import Effort
from residency.runtime.pinning import NUM_THREADS, Pinned


class NothingToMeasure(Exception):
    """Why a probe has no meaning on this device."""


def pinning(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """Registering memory that was touched. Raises CapacityError where the system refuses."""
    if device.type != "cuda":
        raise NothingToMeasure("memory is pinned for a GPU alone")
    piece = max(1, effort.bank_bytes // NUM_THREADS // ROW_BYTES)
    rows = [empty_rows(piece, ROW_BYTES).fill_(1) for _ in range(NUM_THREADS)]
    num_bytes = sum(tensor.nbytes for tensor in rows)
    found = []
    for _ in range(effort.repeats):
        start = time.perf_counter()
        pinned = Pinned(rows, None)
        found.append(num_bytes / (time.perf_counter() - start))
        pinned.release()
    what = f"{num_bytes / 2**30:.1f} GiB that were touched, {NUM_THREADS} threads"
    yield Measurement.of(PIN, what, BYTES_S, found)
