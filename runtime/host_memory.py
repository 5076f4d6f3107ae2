"""Host memory for experts: in huge pages where the system gives them.

A device that reads host memory by itself translates an address for every page; with pages of 2 MB
instead of 4 KB there are 512 times fewer to find.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on most arm64 systems


def empty_rows(num_rows: int, row_bytes: int) -> torch.Tensor:
    """uint8 [num_rows, row_bytes], not touched yet, so no page is taken before it is written.

    It begins at a multiple of HUGE_PAGE, and the system is asked for huge pages; where it has none
    to give, or does not know the request, the memory is ordinary.
    """
    num_bytes = num_rows * row_bytes
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has a setting of its own
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags)
    with suppress(OSError):  # a kernel built without them
        region.madvise(mmap.MADV_HUGEPAGE)
    skipped = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    # A tensor of its own, which keeps the region alive, and no view: whether memory is pinned is
    # asked of where a storage begins.
    rows = torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=skipped)
    return rows.view(num_rows, row_bytes)
