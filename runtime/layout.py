"""The layout of a row: one expert's stored tensors one after another, each at 64 bytes.

Bank, slot and staging place hold the same bytes, so a transfer is a copy of rows, and an expert's
result cannot depend on where it lies (some kernels give other bits off 32-byte boundaries).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from residency.runtime.formats import ExpertFormat

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
    """Which tensors a row holds and where: the matrices' stored parts, then the biases."""

    format: ExpertFormat
    parts: tuple[Part, ...]
    row_bytes: int

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        format: ExpertFormat,
        dtype: torch.dtype,
        *,
        transposed: bool = False,
    ) -> RowLayout:
        """The layout of one expert's parameters, named and shaped as its module has them.

        Matrices are stored by the format as [n, k]; transposed: the module says [k, n]. A matrix
        NAME has the parts NAME, NAME.scale, ... (one for each stored suffix). Biases (of one
        dimension) follow all matrices, in dtype, the model's.
        """
        format = format.oriented(transposed)
        entries: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        for name, shape in shapes.items():
            if len(shape) == 2:
                n, k = reversed(shape) if transposed else shape
                entries += [(part_name(name, s), of, as_) for s, of, as_ in format.stored(n, k)]
        entries += [(name, tuple(s), dtype) for name, s in shapes.items() if len(s) == 1]
        parts, offset = [], 0
        for name, shape, stored_as in entries:
            part = Part(name, tuple(shape), stored_as, offset)
            parts.append(part)
            offset = _aligned(offset + part.num_bytes)
        return cls(format, tuple(parts), offset)

    def suffixes(self, name: str) -> dict[str, str]:
        """The stored suffixes of the matrix `name`, and the part that holds each."""
        suffixes = (part.name.partition(".") for part in self.parts)
        return {suffix: part_name(name, suffix) for first, _, suffix in suffixes if first == name}

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each part of all rows by name, as [R, *shape] views of `rows` (uint8 [R, row_bytes])."""
        return {
            part.name: rows[:, part.offset : part.offset + part.num_bytes]
            .view(part.dtype)
            .unflatten(1, part.shape)
            for part in self.parts
        }


def part_name(matrix: str, suffix: str) -> str:
    """The name of a matrix's part: its own for the elements, else NAME.SUFFIX."""
    return f"{matrix}.{suffix}" if suffix else matrix


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
