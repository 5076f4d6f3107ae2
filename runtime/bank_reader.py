"""The bank reader: experts from shards into their rows, by several threads, each byte read once.

What lies together in a file is read by one call, straight into the rows; only tensors of which a
row holds something else (another dtype, a reciprocal) pass through memory of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from residency.policies.errors import CheckpointError
from residency.runtime.banks import Banks
from residency.runtime.checkpoint import Entry
from residency.runtime.expert_sources import Source
from residency.runtime.shards import Shards, bytes_of

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all

RUN_BYTES = 16 << 20  # most bytes of one call
RUN_PIECES = 512  # most buffers of one call; systems take 1024
PASSING_BYTES = 1 << 19  # most bytes of a call that pass through memory of their own
GAP_BYTES = 1 << 16  # unneeded bytes up to so many are read and dropped rather than sought over
NUM_THREADS = min(16, 2 * (os.cpu_count() or 1))
# An element is not finite where all bits of the mask are set. e8m0 is kept as uint8.
NOT_FINITE: dict[torch.dtype, tuple[type[np.generic], int]] = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.float16: (np.uint16, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float8_e4m3fn: (np.uint8, 0x7F),
    torch.float8_e8m0fnu: (np.uint8, 0xFF),
    torch.uint8: (np.uint8, 0xFF),
}


class Piece(NamedTuple):
    """Consecutive bytes of a shard that belong to one expert. start: in the layer's bank."""

    source: Source
    offset: int
    num_bytes: int
    start: int


def read_banks(
    banks: Banks, sources: Sequence[Source], shards: Shards, progress: Progress | None
) -> None:
    """Fill `banks` from `sources`. progress counts bytes of the rows, their alignment left out.

    Raises CheckpointError naming file and key where a file ends early or a scale is not finite.
    """
    reader, pieces = _Reader(banks, shards), _pieces(banks, sources)
    done, total = 0, sum(piece.source.num_bytes for piece in pieces)
    pool = ThreadPoolExecutor(NUM_THREADS)
    try:
        for size in pool.map(reader.read, list(_runs(pieces))):
            done += size
            if progress is not None:
                progress("experts", done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(banks: Banks, sources: Sequence[Source]) -> list[Piece]:
    """In the order of the files."""
    row_bytes, num_experts = banks.layout.row_bytes, banks.space.num_experts
    pieces = []
    for source in sorted(sources, key=lambda s: (str(s.entry.file), s.entry.offset)):
        experts = range(num_experts) if source.expert is None else (source.expert,)
        size = source.entry.num_bytes // len(experts)
        for number, expert in enumerate(experts):
            offset = source.entry.offset + number * size
            pieces.append(Piece(source, offset, size, expert * row_bytes + source.offset))
    return pieces


def _runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces of one file that lie together, within the limits of one call."""
    run: list[Piece] = []
    size = passing = end = 0
    for piece in pieces:
        passes = piece.num_bytes if piece.source.stored else 0
        if run and (
            piece.source.entry.file != run[0].source.entry.file
            or piece.offset - end > GAP_BYTES
            or size + piece.num_bytes > RUN_BYTES
            or (passes and passing + passes > PASSING_BYTES)
            or 2 * len(run) >= RUN_PIECES
        ):
            yield run
            run, size, passing = [], 0, 0
        run.append(piece)
        size, passing, end = (
            size + piece.num_bytes,
            passing + passes,
            piece.offset + piece.num_bytes,
        )
    if run:
        yield run


class _Reader:
    """Reads one run at a time; safe for use from several threads on different runs."""

    def __init__(self, banks: Banks, shards: Shards) -> None:
        self._shards = shards
        self._layers = [bytes_of(rows) for rows in banks.layers]

    def read(self, run: list[Piece]) -> int:
        """Returns how many bytes of the banks it filled."""
        buffers, passing = [], {}
        end = run[0].offset
        for number, piece in enumerate(run):
            if piece.offset > end:
                buffers.append(memoryview(bytearray(piece.offset - end)))
            if piece.source.stored is None:
                buffers.append(self._row(piece))
            else:
                passing[number] = torch.empty(piece.num_bytes, dtype=torch.uint8)
                buffers.append(bytes_of(passing[number]))
            end = piece.offset + piece.num_bytes
        self._shards.read(run[0].source.entry.file, run[0].offset, buffers)
        for number, piece in enumerate(run):
            if number in passing:
                self._store(piece, passing.pop(number))
            if piece.source.kind.suffix:
                dtype = piece.source.kind.part.dtype
                require_finite(piece.source.entry, self._row(piece), dtype)
        return sum(piece.source.num_bytes for piece in run)

    def _row(self, piece: Piece) -> memoryview:
        """The bytes of the row that the piece fills."""
        layer = self._layers[piece.source.kind.layer]
        return layer[piece.start : piece.start + piece.source.num_bytes]

    def _store(self, piece: Piece, raw: torch.Tensor) -> None:
        """Convert the tensor's bytes into the row."""
        source, part = piece.source, piece.source.kind.part
        assert source.stored is not None, "only what is converted passes here"
        shape = source.entry.shape if source.expert is not None else source.entry.shape[1:]
        made = source.stored(raw.view(source.entry.dtype).view(shape)).reshape(-1)
        place = torch.frombuffer(self._row(piece), dtype=torch.uint8).view(part.dtype)
        place.copy_(made)


def require_finite(entry: Entry, data: memoryview, dtype: torch.dtype) -> None:
    """Raises CheckpointError for scales, stored as dtype in `data`, of which one is no number."""
    kind, mask = NOT_FINITE[dtype]
    bits = np.frombuffer(data, dtype=kind)
    if ((bits & kind(mask)) == mask).any():
        raise CheckpointError(f"{entry}: a scale is NaN or infinite; fetch the file again")
