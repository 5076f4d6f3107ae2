"""Routing: replaces the routes a model's routers choose, for measuring with made-up weights.

N tokens of a table, L layers, K experts per token, T tokens of a step.
"""

from __future__ import annotations

from typing import Protocol

import torch

from residency.policies.step import Phase, Step

ROW_STRIDE = 10007  # a prime, so that sequences lie far apart in a table of any likely length


class Routing(Protocol):
    """Where each token goes, instead of where the model's router sends it."""

    def routes(self, step: Step, ids_TK: torch.Tensor) -> torch.Tensor:
        """int64 [T, K] experts of the step's tokens, distinct within a token.

        Runs inside captured graphs: fixed shapes, no host synchronisation. step.token is the index
        of the last of the T tokens of a chunk; in decode, of each of T sequences' one token.
        """


class TableRouting:
    """Routes written down beforehand: token i takes row i modulo N, whatever its text.

    So one engine's tokens are routed the same in an eager step, in a captured one, and again after
    `OffloadRuntime.forget`, which starts the clock anew. Sequences that are decoded together follow
    the table at places ROW_STRIDE tokens apart: they share experts by chance alone.
    """

    def __init__(self, table_NLK: torch.Tensor) -> None:
        """table_NLK: integer ids within the layer, on the device that routes."""
        # One look-up a layer in the type that kernels take, since it is part of what is timed.
        self.tables_NK = [table.contiguous() for table in table_NLK.long().unbind(1)]
        self._rows_T: torch.Tensor | None = None

    @property
    def table_NLK(self) -> torch.Tensor:
        return torch.stack(self.tables_NK, dim=1)

    def routes(self, step: Step, ids_TK: torch.Tensor) -> torch.Tensor:
        num_tokens = ids_TK.shape[0]
        if step.layer == 0 or self._rows_T is None or len(self._rows_T) != num_tokens:
            if step.phase is Phase.DECODE:
                behind_T = ROW_STRIDE * torch.arange(num_tokens, device=ids_TK.device)
            else:
                behind_T = torch.arange(1 - num_tokens, 1, device=ids_TK.device)
            self._rows_T = (step.token + behind_T).remainder(len(self.tables_NK[0]))
        return self.tables_NK[step.layer].index_select(0, self._rows_T)


def adjacent_reuse(table_NLK: torch.Tensor) -> float:
    """Share of a token's experts that the token before it used too, over all layers."""
    return adjacent_overlap(table_NLK[:-1], table_NLK[1:])


def adjacent_overlap(before: torch.Tensor, after: torch.Tensor) -> float:
    """Share of the last dimension's ids in `after` that `before` holds as well."""
    shared = (after[..., :, None] == before[..., None, :]).any(-1)
    return float(shared.sum() / shared.numel())
