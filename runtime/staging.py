"""Staging: a ring of group buffers outside the slot pool, for experts that only pass through."""

from __future__ import annotations

from dataclasses import dataclass, field

from residency.runtime.lanes import Lanes, Mark


@dataclass
class Buffer:
    """Room for one group of experts. `free` lies behind the last compute that read it."""

    first_row: int
    num_rows: int
    free: Mark = field(default_factory=Mark)

    def rows(self, count: int) -> range:
        assert count <= self.num_rows, f"{count} experts for a buffer of {self.num_rows} rows"
        return range(self.first_row, self.first_row + count)


class StagingRing:
    """Buffers in turn: acquire one to copy into, release it behind the compute that reads it."""

    def __init__(self, first_row: int, num_buffers: int, buffer_rows: int, lanes: Lanes) -> None:
        self._lanes = lanes
        self._idle = [Buffer(first_row + i * buffer_rows, buffer_rows) for i in range(num_buffers)]
        self._all = tuple(self._idle)

    def acquire(self) -> Buffer | None:
        """The buffer released longest ago, or None while all are in flight."""
        return self._idle.pop(0) if self._idle else None

    def release(self, buffer: Buffer) -> None:
        buffer.free = self._lanes.mark()
        self._idle.append(buffer)

    def reset(self) -> None:
        """Take all buffers back after a step that was broken off; the device must be idle."""
        self._idle = list(self._all)
