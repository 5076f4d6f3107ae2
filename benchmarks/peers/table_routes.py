"""Routes of one of our tables inside freetoken, in its captured decode steps too.

N tokens of a table, L layers, K experts per token, T tokens of a step.
"""

from __future__ import annotations

from typing import Any

import torch


class TableRoutes:
    """A token takes the row of its position, `shift` rows further on, modulo N.

    Positions and shift lie in tensors, and a captured step reads both whenever it is replayed.
    Nothing touches the device before the first step: freetoken refuses to start where CUDA runs.
    """

    def __init__(self, table_NLK: torch.Tensor) -> None:
        self._tables_LNK = table_NLK.int().transpose(0, 1).contiguous()
        self._shift = torch.zeros(1, dtype=torch.int32)
        self._rows_T = torch.empty(0)

    @torch.inference_mode()
    def start(self, shift: int) -> None:
        """Rows by which our run's clock is ahead of positions, from the next step on."""
        self._shift.fill_(shift)

    def ids(self, layer: int, positions_T: torch.Tensor) -> torch.Tensor:
        """int32 [T, K], which the caller may overwrite. Layers are asked in order, from 0 on."""
        if layer == 0:
            self._move_to(positions_T.device)
            self._rows_T = (positions_T + self._shift).remainder(self._tables_LNK.shape[1])
        return self._tables_LNK[layer].index_select(0, self._rows_T)

    def _move_to(self, device: torch.device) -> None:
        """Only the first step, which none captures, does anything."""
        self._tables_LNK = self._tables_LNK.to(device)
        self._shift = self._shift.to(device)


def install(routes: TableRoutes) -> None:
    """freetoken's routers run as ever; their weights go to the table's experts."""
    from freetoken.core import get_global_ctx
    from freetoken.layers.moe import OffloadMoELayer

    def replaced(own: Any) -> Any:
        def routed(self: Any, x_TH: Any, weights_TK: Any, ids_TK: torch.Tensor) -> Any:
            routes_TK = routes.ids(self.layer_id, get_global_ctx().batch.positions)
            assert routes_TK.shape == ids_TK.shape, f"{routes_TK.shape} is not {ids_TK.shape}"
            return own(self, x_TH, weights_TK, routes_TK)

        return routed

    for name in ("_prefill_routed", "_decode_routed"):
        setattr(OffloadMoELayer, name, replaced(getattr(OffloadMoELayer, name)))
