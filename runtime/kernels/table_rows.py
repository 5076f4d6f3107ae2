"""Rows of a host table by ids that only the device knows.

A table lies in pinned host memory; a row is a few hundred bytes, so every (token, row) is a program
of its own and all of them are on the link at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def table_rows(table_ND: Tensor, ids: Tensor) -> Tensor:
    """table[ids mod N], [.., D]; ids int64, not negative, on any device, where the result lies."""
    at = torch.remainder(ids, table_ND.shape[0]).flatten().to(table_ND.device)
    return table_ND.index_select(0, at).to(ids.device).view(*ids.shape, -1)


@triton.jit
def _rows_kernel(
    table_ptr: tl.tensor, ids_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
) -> None:  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + item) % num_rows
    d = tl.arange(0, DIM_PAD)
    data = tl.load(table_ptr + row * DIM + d, mask=d < DIM)
    tl.store(out_ptr + item * DIM + d, data, mask=d < DIM)


def launch_table_rows(table_ND: Tensor, ids: Tensor) -> Tensor:
    """Triton form of `table_rows`: a table in pinned host memory, contiguous ids on the device."""
    num_rows, dim = table_ND.shape
    out = torch.empty(*ids.shape, dim, dtype=table_ND.dtype, device=ids.device)
    if ids.numel():
        _rows_kernel[(ids.numel(),)](
            table_ND, ids, out, num_rows, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), num_warps=1
        )
    return out
