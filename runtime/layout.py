"""The layout of a row: one expert's tensors, one after another, each on a 64-byte boundary.

Bank, slot and staging place hold the same bytes, so a transfer is a copy of rows, and an expert's
result cannot depend on where it lies (some kernels give other bits off 32-byte boundaries).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Part:
    """One tensor of an expert. offset and num_bytes are within the row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """Which tensors a row holds and where."""

    parts: tuple[Part, ...]
    row_bytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> RowLayout:
        """The layout of one expert's tensors, in the order given."""
        parts, offset = [], 0
        for name, shape in shapes.items():
            part = Part(name, tuple(shape), dtype, offset)
            parts.append(part)
            offset = _aligned(offset + part.num_bytes)
        return cls(tuple(parts), offset)

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each part of all rows by name, as [R, *shape] views of `rows` (uint8 [R, row_bytes])."""
        return {
            part.name: rows[:, part.offset : part.offset + part.num_bytes]
            .view(part.dtype)
            .unflatten(1, part.shape)
            for part in self.parts
        }


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
