"""Shards: a checkpoint's files, open for reads from any thread into memory that is there already.

Reads are positional, without a mapping: pages of a mapped file count as the process's own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from residency.policies.errors import CheckpointError
from residency.runtime.checkpoint import Entry

HAS_ADVICE = hasattr(os, "posix_fadvise")


class Shards:
    """Open files by path. keep_cached: leave what was read in the system's file cache."""

    def __init__(self, *, keep_cached: bool = True) -> None:
        self._keep_cached = keep_cached
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, file: Path, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after another, with the bytes of `file` from `offset` on.

        Raises CheckpointError where the file ends before, or cannot be read.
        """
        descriptor = self._descriptor(file)
        todo, start = list(buffers), offset
        try:
            while todo:
                read = os.preadv(descriptor, todo, offset)
                if read == 0:
                    raise CheckpointError(f"{file}: ends at byte {offset}; fetch it again")
                offset += read
                todo = _rest(todo, read)
            if HAS_ADVICE and not self._keep_cached:
                os.posix_fadvise(descriptor, start, offset - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _unreadable(file, error) from error

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The entry's tensor in memory of its own."""
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.num_bytes:
            self.read(entry.file, entry.offset, [bytes_of(tensor)])
        return tensor

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise _unreadable(file, error) from error
                if HAS_ADVICE:
                    os.posix_fadvise(self._files[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._files[file]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _rest(buffers: list[memoryview], read: int) -> list[memoryview]:
    """What of `buffers` is unfilled after the first `read` bytes."""
    for number, buffer in enumerate(buffers):
        if read < len(buffer):
            return [buffer[read:], *buffers[number + 1 :]]
        read -= len(buffer)
    return []


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read ({error.strerror or error})")
