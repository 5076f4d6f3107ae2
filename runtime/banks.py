"""Banks: the host memory where all experts live, one row each."""

from __future__ import annotations

import time

import torch

from residency.policies.step import IdSpace
from residency.runtime.host_memory import empty_rows
from residency.runtime.layout import RowLayout


class Banks:
    """Every expert of every MoE layer, in host memory, outside any policy's reach."""

    def __init__(self, space: IdSpace, layout: RowLayout) -> None:
        self.space = space
        self.layout = layout
        self.layers = [
            empty_rows(space.num_experts, layout.row_bytes) for _ in range(space.num_layers)
        ]
        self._views = [layout.views(rows) for rows in self.layers]
        self._sums: list[torch.Tensor] | None = None
        self._verified_s = 0.0

    @property
    def num_bytes(self) -> int:
        return self.space.num_ids * self.layout.row_bytes

    def weights(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's expert tensors by name, [E, *shape] views of the bank."""
        return self._views[layer]

    # Checksums: of each row the sum of its 64-bit words, modulo 2^64. It finds every change within
    # one word, and of several words all but one in 2^64; it reads memory as fast as it can be read.

    def remember(self) -> None:
        """From now on `changed` tells which rows differ from what they are now."""
        self._sums = self._row_sums()

    def changed(self) -> list[tuple[int, int]]:
        """(layer, expert) of the rows that differ; none where nothing is remembered."""
        if self._sums is None:
            return []
        start = time.perf_counter()
        pairs = zip(self._sums, self._row_sums(), strict=True)
        found = [
            (layer, expert)
            for layer, (before, now) in enumerate(pairs)
            for expert in (before != now).nonzero().flatten().tolist()
        ]
        self._verified_s = time.perf_counter() - start
        return found

    def notes(self) -> list[str]:
        """A line for a report, where rows are remembered."""
        if self._sums is None:
            return []
        rate = self.num_bytes / self._verified_s / 1e9 if self._verified_s else 0.0
        return [
            f"banks verified: {self.space.num_ids:,} experts as loaded, {self.num_bytes:,} bytes "
            f"read in {self._verified_s:.3f} s ({rate:.1f} GB/s), which no other figure counts"
        ]

    def _row_sums(self) -> list[torch.Tensor]:
        """int64 [E] by layer."""
        return [rows.view(torch.int64).sum(dim=1) for rows in self.layers]
