"""A busy CPU: every other core reads memory, as experts on the host would."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

READ_BYTES = 64 << 20  # of each reader, more than its share of a cache


@contextmanager
def busy_cpu(readers: int | None = None) -> Iterator[int]:
    """Inside, threads read memory; gives their number. readers: None for all cores but one."""
    number = max(1, len(os.sched_getaffinity(0)) - 1) if readers is None else readers
    memory = np.ones((number, READ_BYTES // 8), dtype=np.int64)
    stop = threading.Event()

    def read(own: np.ndarray) -> None:
        while not stop.is_set():
            own.sum()  # numpy lets go of Python's lock meanwhile

    threads = [threading.Thread(target=read, args=(own,), daemon=True) for own in memory]
    for thread in threads:
        thread.start()
    try:
        yield number
    finally:
        stop.set()
        for thread in threads:
            thread.join()
