"""Banks: the host memory where all experts live, one row each."""

from __future__ import annotations

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

    @property
    def num_bytes(self) -> int:
        return self.space.num_ids * self.layout.row_bytes

    def weights(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's expert tensors by name, [E, *shape] views of the bank."""
        return self._views[layer]
