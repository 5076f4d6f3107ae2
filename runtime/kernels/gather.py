"""Copies experts' rows by lists that only the device knows.

A host link is slow enough that few programs saturate it, provided that enough bytes are asked
for at once; so each row is cut into chunks and dealt over all programs, and one row alone keeps
every program busy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


class GatherConfig(NamedTuple):
    """Grid size, bytes which a program copies per turn, and warps of a program."""

    num_programs: int
    chunk_bytes: int
    num_warps: int


FROM_HOST = GatherConfig(132, 8192, 4)
ON_DEVICE = GatherConfig(132 * 8, 16384, 4)


def gather(
    bank: Tensor, rows: Tensor, copy_expert: Tensor, copy_slot: Tensor, num_copies: Tensor
) -> None:
    """rows[copy_slot[i]] = bank[copy_expert[i]] for i < num_copies.

    bank uint8 [E, row_bytes]; rows uint8 [num_rows, row_bytes]; copy_* int32 [N];
    num_copies int32 [1]. Synchronises with the host where these are on a device.
    """
    num = int(num_copies)
    rows[copy_slot[:num].long()] = bank[copy_expert[:num].long()]


@triton.jit
def _gather_kernel(
    bank_ptr: tl.tensor, rows_ptr: tl.tensor, copy_expert_ptr: tl.tensor, copy_slot_ptr: tl.tensor,
    num_copies_ptr: tl.tensor, end_ptr: tl.tensor, row_lines: tl.tensor,
    CHUNK_WORDS: tl.constexpr,
) -> None:  # fmt: skip
    row_words = row_lines * 8
    chunks = tl.cdiv(row_words, CHUNK_WORDS)
    total = tl.load(num_copies_ptr) * chunks
    lane = tl.arange(0, CHUNK_WORDS)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        copy = item // chunks
        word = (item - copy * chunks) * CHUNK_WORDS + lane
        expert = tl.load(copy_expert_ptr + copy).to(tl.int64)
        slot = tl.load(copy_slot_ptr + copy).to(tl.int64)
        inside = word < row_words
        data = tl.load(bank_ptr + expert * row_words + word, mask=inside)
        tl.store(rows_ptr + slot * row_words + word, data, mask=inside)
    if end_ptr is not None:
        tl.atomic_max(end_ptr, globaltimer(), sem="relaxed")


def launch_gather(
    bank: Tensor,
    rows: Tensor,
    copy_expert: Tensor,
    copy_slot: Tensor,
    num_copies: Tensor,
    config: GatherConfig | None = None,
    end: Tensor | None = None,
) -> None:
    """Triton form of `gather`; bank is pinned host memory or on the device of rows.

    end: int64 [1], where given, becomes the time of the last program's end (`kernels.publish`).
    """
    cfg = config or (ON_DEVICE if bank.device == rows.device else FROM_HOST)
    row_bytes = rows.shape[1]
    assert bank.shape[1] == row_bytes, f"bank row {bank.shape[1]} B, device row {row_bytes} B"
    assert row_bytes % 64 == 0, f"a row of {row_bytes} B is no multiple of 64"
    _gather_kernel[(cfg.num_programs,)](
        bank.view(torch.int64), rows.view(torch.int64),
        copy_expert, copy_slot, num_copies, end, row_bytes // 64,
        CHUNK_WORDS=cfg.chunk_bytes // 8, num_warps=cfg.num_warps,
    )  # fmt: skip
