"""How an expert's matrices lie in a row of bytes, and how a kernel loads a tile of one.

A row holds `gate_up` [2I, H] (gate rows first), then `down` [H, I]; each starts at a multiple of
64 bytes. A format stores one matrix self-contained: whatever a tile load needs besides the
elements (scales, say) follows them at a distance computable from the matrix's shape, so that one
byte offset names a matrix in every format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGN_BYTES = 64


class Format(Protocol):
    """One storage form of a matrix."""

    @property
    def load(self) -> Any:
        """Jitted `load(row_ptr, offset_bytes, n, k, N, K, mask)` -> tile of the matrix [N, K].

        `row_ptr` points to uint8; `n` and `k` are int32 index tensors whose broadcast is the
        tile's shape; `mask` broadcasts likewise or is None; masked elements are zero.
        """

    def num_bytes(self, n: int, k: int) -> int:
        """Bytes of one stored [n, k] matrix, before alignment."""

    def unpack(self, stored: Tensor, n: int, k: int) -> Tensor:
        """uint8 [..., num_bytes(n, k)] -> [..., n, k] in the dtype the products take."""

    def pack(self, matrix: Tensor) -> Tensor:
        """[..., n, k] -> uint8 [..., num_bytes(n, k)]."""


@triton.jit
def _load_elements(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, k: tl.tensor, K: tl.tensor,
    mask: tl.tensor, ELEMENT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    matrix = (row_ptr + offset_bytes).to(tl.pointer_type(ELEMENT))
    if mask is None:
        return tl.load(matrix + (n * K + k))
    else:
        return tl.load(matrix + (n * K + k), mask=mask, other=0.0)


@triton.jit
def _load_bf16(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, k: tl.tensor, N: tl.tensor,
    K: tl.tensor, mask: tl.tensor,
) -> tl.tensor:  # fmt: skip
    return _load_elements(row_ptr, offset_bytes, n, k, K, mask, tl.bfloat16)


@triton.jit
def _load_fp16(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, k: tl.tensor, N: tl.tensor,
    K: tl.tensor, mask: tl.tensor,
) -> tl.tensor:  # fmt: skip
    return _load_elements(row_ptr, offset_bytes, n, k, K, mask, tl.float16)


@triton.jit
def _load_fp32(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, k: tl.tensor, N: tl.tensor,
    K: tl.tensor, mask: tl.tensor,
) -> tl.tensor:  # fmt: skip
    return _load_elements(row_ptr, offset_bytes, n, k, K, mask, tl.float32)


_PLAIN_LOADS = {
    torch.bfloat16: _load_bf16,
    torch.float16: _load_fp16,
    torch.float32: _load_fp32,
}


@dataclass(frozen=True)
class Plain:
    """Elements as they are, row-major: bf16, fp16 or fp32."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _PLAIN_LOADS:
            known = ", ".join(str(dtype) for dtype in _PLAIN_LOADS)
            raise ValueError(f"no plain format of {self.dtype}; there are {known}")

    @property
    def load(self) -> Any:
        return _PLAIN_LOADS[self.dtype]

    def num_bytes(self, n: int, k: int) -> int:
        return n * k * self.dtype.itemsize

    def unpack(self, stored: Tensor, n: int, k: int) -> Tensor:
        return stored.view(self.dtype).view(*stored.shape[:-1], n, k)

    def pack(self, matrix: Tensor) -> Tensor:
        return matrix.to(self.dtype).contiguous().flatten(-2).view(torch.uint8)


@dataclass(frozen=True)
class ExpertShape:
    """The extent of one expert and where its matrices begin in a row."""

    hidden: int
    width: int
    format: Format

    @property
    def gate_up_offset_bytes(self) -> int:
        return 0

    @property
    def down_offset_bytes(self) -> int:
        return _aligned(self.format.num_bytes(2 * self.width, self.hidden))

    @property
    def row_bytes(self) -> int:
        down = self.format.num_bytes(self.hidden, self.width)
        return self.down_offset_bytes + _aligned(down)

    def gate_up(self, rows: Tensor) -> Tensor:
        """uint8 [..., row_bytes] -> [..., 2I, H]."""
        stored = self.format.num_bytes(2 * self.width, self.hidden)
        return self.format.unpack(rows[..., :stored], 2 * self.width, self.hidden)

    def down(self, rows: Tensor) -> Tensor:
        """uint8 [..., row_bytes] -> [..., H, I]."""
        begin = self.down_offset_bytes
        end = begin + self.format.num_bytes(self.hidden, self.width)
        return self.format.unpack(rows[..., begin:end], self.hidden, self.width)

    def pack(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """[..., 2I, H] and [..., H, I] -> uint8 [..., row_bytes]; gaps are zero."""
        rows = gate_up.new_zeros(*gate_up.shape[:-2], self.row_bytes, dtype=torch.uint8)
        first, second = self.format.pack(gate_up), self.format.pack(down)
        rows[..., : first.shape[-1]] = first
        begin = self.down_offset_bytes
        rows[..., begin : begin + second.shape[-1]] = second
        return rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
