"""Recording routes: which experts each token went to, written on the device as it happens.

The file is what `model.routing=trace:FILE` follows (docs/trace-format.md). N tokens, L layers,
K experts per token, T tokens of a step.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch

from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.results import write_whole


class RouteRecorder:
    """Room for the routes of `num_tokens` tokens behind token `after` of the engine's clock."""

    def __init__(
        self, space: IdSpace, num_tokens: int, after: torch.Tensor, device: torch.device
    ) -> None:
        self.space = space
        self._first = after.clone() + 1
        shape = (num_tokens, space.num_layers, space.top_k)
        self._table_NLK = torch.full(shape, -1, dtype=torch.int16, device=device)
        self._decoded_N = torch.zeros(num_tokens, dtype=torch.bool, device=device)

    def record(self, step: Step, ids_TK: torch.Tensor) -> None:
        """Note the step's routes. Fixed shapes, no host synchronisation: captured graphs do it."""
        num_tokens = len(ids_TK)
        behind_T = torch.arange(1 - num_tokens, 1, device=ids_TK.device)
        rows_T = step.token - self._first + behind_T
        self._table_NLK[:, step.layer].index_copy_(0, rows_T, ids_TK.short())
        if step.phase is Phase.DECODE and step.layer == 0:
            self._decoded_N.index_fill_(0, rows_T, True)

    def save(self, file: Path) -> None:
        """Write what was recorded, whole or not at all. Raises OutputError."""
        table = self._table_NLK.cpu().numpy()
        seen = (table >= 0).all(axis=(1, 2))
        small = np.uint8 if self.space.num_experts <= 256 else np.uint16
        content = io.BytesIO()
        np.savez_compressed(
            content,
            expert_ids=table[seen].astype(small),
            num_experts=np.int64(self.space.num_experts),
            decode=self._decoded_N.cpu().numpy()[seen],
        )
        write_whole({file: content.getvalue()}, "--routes")
