"""Tile shapes of the expert kernels: what is chosen, and the candidates to time, by format.

Choices depend on the expert's shape and format and, for a chunk, on its size, never on a group or
on a token's company, so that these cannot change bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from residency.runtime.formats import Plain
from residency.runtime.kernels.formats import ExpertShape


class DecodeConfig(NamedTuple):
    """Tile of one program of a matrix-vector pass; fold columns share one accumulator."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fold: int = 1


class TileShape(NamedTuple):
    """Extent of one program's product; block_n counts weight rows, gate and up together."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ChunkTiles(NamedTuple):
    """Tile shapes of both passes; block_m is common, since they share the tile list."""

    gate_up: TileShape
    down: TileShape


_GATE_UP_CONFIGS = {
    "plain": [
        DecodeConfig(4, 256, 2, 3),
        DecodeConfig(4, 1024, 4, 1),
        DecodeConfig(2, 1024, 4, 1),
        DecodeConfig(4, 512, 4, 1),
        DecodeConfig(2, 512, 2, 1),
        DecodeConfig(1, 1024, 4, 1),
        DecodeConfig(4, 256, 1, 1),
        DecodeConfig(8, 512, 4, 3),
        DecodeConfig(4, 256, 2, 3, 8),
        DecodeConfig(8, 256, 2, 3, 8),
    ],
    # Sixteen bytes a thread and row: 32 four-bit columns or 16 of eight bits, folded there.
    "fp8_block": [
        DecodeConfig(8, 256, 2, 3, 16),
        DecodeConfig(4, 256, 1, 3, 16),
        DecodeConfig(16, 128, 2, 3, 16),
        DecodeConfig(8, 256, 2, 1, 16),
        DecodeConfig(4, 512, 2, 1, 16),
        DecodeConfig(4, 256, 1, 1, 16),
    ],
    "nvfp4": [
        DecodeConfig(4, 512, 2, 3, 32),
        DecodeConfig(8, 512, 2, 3, 32),
        DecodeConfig(2, 512, 1, 3, 32),
        DecodeConfig(4, 512, 2, 2, 32),
        DecodeConfig(4, 512, 2, 4, 32),
        DecodeConfig(4, 512, 2, 1, 32),
        DecodeConfig(8, 512, 2, 1, 32),
        DecodeConfig(2, 512, 1, 1, 32),
    ],
    "mxfp4": [
        DecodeConfig(4, 512, 2, 3, 32),
        DecodeConfig(8, 512, 4, 3, 32),
        DecodeConfig(2, 1024, 2, 3, 32),
        DecodeConfig(4, 512, 2, 1, 32),
        DecodeConfig(8, 256, 2, 1, 32),
        DecodeConfig(8, 512, 4, 1, 32),
    ],
}
_DOWN_CONFIGS = {
    "plain": [
        DecodeConfig(4, 1024, 4, 1),
        DecodeConfig(2, 1024, 4, 1),
        DecodeConfig(1, 1024, 4, 1),
        DecodeConfig(4, 256, 2, 1),
        DecodeConfig(4, 256, 1, 1),
        DecodeConfig(8, 128, 2, 1),
        DecodeConfig(4, 256, 4, 3),
        DecodeConfig(8, 256, 4, 3),
        DecodeConfig(4, 256, 2, 1, 8),
        DecodeConfig(4, 1024, 4, 1, 8),
    ],
    "fp8_block": [
        DecodeConfig(8, 256, 2, 1, 16),
        DecodeConfig(16, 128, 2, 1, 16),
        DecodeConfig(8, 128, 1, 1, 16),
        DecodeConfig(4, 256, 1, 1, 16),
        DecodeConfig(8, 256, 2, 3, 16),
    ],
    "nvfp4": [
        DecodeConfig(8, 128, 1, 1, 32),
        DecodeConfig(16, 128, 2, 1, 32),
        DecodeConfig(4, 256, 1, 1, 32),
        DecodeConfig(16, 128, 2, 3, 32),
        DecodeConfig(8, 256, 2, 3, 32),
        DecodeConfig(2, 1024, 2, 1, 32),
    ],
    "mxfp4": [
        DecodeConfig(4, 512, 2, 3, 32),
        DecodeConfig(8, 512, 4, 3, 32),
        DecodeConfig(4, 512, 2, 1, 32),
        DecodeConfig(2, 512, 1, 1, 32),
        DecodeConfig(8, 256, 2, 1, 32),
    ],
}
_TRANSPOSED = [
    DecodeConfig(128, 16, 4, 1),
    DecodeConfig(64, 32, 4, 1),
    DecodeConfig(128, 32, 8, 1),
    DecodeConfig(64, 16, 4, 1),
    DecodeConfig(256, 8, 4, 1),
    DecodeConfig(64, 32, 4, 3),
]
CHUNK_TILES = [
    ChunkTiles(TileShape(16, 64, 128, 4, 4), TileShape(16, 64, 128, 4, 4)),
    ChunkTiles(TileShape(16, 128, 128, 4, 3), TileShape(16, 64, 128, 4, 4)),
    ChunkTiles(TileShape(32, 128, 64, 4, 4), TileShape(32, 128, 64, 4, 4)),
    ChunkTiles(TileShape(64, 128, 64, 4, 4), TileShape(64, 128, 64, 4, 4)),
    ChunkTiles(TileShape(64, 256, 64, 8, 3), TileShape(64, 256, 64, 8, 3)),
    ChunkTiles(TileShape(128, 128, 64, 8, 4), TileShape(128, 128, 64, 8, 4)),
    ChunkTiles(TileShape(128, 256, 64, 8, 3), TileShape(128, 256, 64, 8, 3)),
    ChunkTiles(TileShape(128, 256, 64, 8, 4), TileShape(128, 128, 64, 8, 4)),
]
# Fp32 elements take twice the shared memory.
_FP32_TILES = ChunkTiles(TileShape(16, 64, 32, 4, 2), TileShape(16, 64, 32, 4, 2))


def gate_up_configs(shape: ExpertShape) -> list[DecodeConfig]:
    """Candidates of the first pass, the chosen one first."""
    if isinstance(shape.format, Plain):
        return _TRANSPOSED if shape.format.transposed else _GATE_UP_CONFIGS["plain"]
    return _GATE_UP_CONFIGS[shape.format.name]


def down_configs(shape: ExpertShape) -> list[DecodeConfig]:
    """Candidates of the second pass, the chosen one first."""
    if isinstance(shape.format, Plain):
        return _TRANSPOSED if shape.format.transposed else _DOWN_CONFIGS["plain"]
    return _DOWN_CONFIGS[shape.format.name]


def choose_gate_up(shape: ExpertShape) -> DecodeConfig:
    return gate_up_configs(shape)[0]


def choose_down(shape: ExpertShape) -> DecodeConfig:
    return down_configs(shape)[0]


def choose_tiles(
    num_pairs: int, num_experts: int, shape: ExpertShape, dtype: torch.dtype
) -> ChunkTiles:
    """From the whole chunk, never from a group."""
    if dtype == torch.float32:
        return _FP32_TILES
    places = num_pairs / num_experts
    if places < 16:
        return CHUNK_TILES[0]
    if places <= 24:
        return CHUNK_TILES[2]
    return CHUNK_TILES[3] if places <= 48 else CHUNK_TILES[6]
