"""Recording routes: which experts each token went to, written on the device as it happens.

N tokens, L layers, K experts per token, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from residency.policies.errors import WorkloadError
from residency.policies.prefill import LayerView, PrefillMode
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.traces.trace import Array, Trace, trace_of
from residency.runtime.traces.writing import save


class Noted(NamedTuple):
    """A step: the tokens it takes, its phase, whether its experts enter the slots, its request."""

    num_tokens: int
    decodes: bool
    admits: bool
    request: int


class RouteRecorder:
    """Room for the routes of `num_tokens` tokens behind token `after` of the engine's clock."""

    def __init__(
        self,
        space: IdSpace,
        num_tokens: int,
        after: torch.Tensor,
        device: torch.device,
        prefill: PrefillMode | None = None,
    ) -> None:
        """prefill: the mode that says of which chunks the experts enter the slots."""
        self.space = space
        self._clock = after
        self._prefill = prefill
        self._first = after.clone() + 1
        shape = (num_tokens, space.num_layers, space.top_k)
        self._table_NLK = torch.full(shape, -1, dtype=torch.int16, device=device)
        self._probs_NLK = torch.zeros(shape, dtype=torch.float16, device=device)
        self._steps: list[Noted] = []
        self._request = 0
        self._kept: list[tuple[Array, Array, list[Noted]]] = []

    def begin(self, phase: Phase, num_tokens: int) -> None:
        """The host's part, before each step, replayed ones included."""
        decodes = phase is Phase.DECODE
        admits = decodes or self._admits(num_tokens)
        self._steps.append(Noted(num_tokens, decodes, admits, self._request))

    def record(self, step: Step, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        """Note the step's routes. Fixed shapes, no host synchronisation: captured graphs do it."""
        num_tokens = len(ids_TK)
        behind_T = torch.arange(1 - num_tokens, 1, device=ids_TK.device)
        rows_T = step.token - self._first + behind_T
        self._table_NLK[:, step.layer].index_copy_(0, rows_T, ids_TK.short())
        self._probs_NLK[:, step.layer].index_copy_(0, rows_T, weights_TK.half())

    def next_request(self) -> None:
        """What follows belongs to another request; there is room for as many tokens again."""
        if not self._steps:
            return
        self._kept.append(self._seen())
        self._steps = []
        self._request += 1
        self._table_NLK.fill_(-1)
        self._first.copy_(self._clock + 1)

    def trace(self, about: Mapping[str, Any] | None = None) -> Trace:
        """What was recorded. Raises WorkloadError where nothing was."""
        parts = [*self._kept, self._seen()]
        steps = [step for part in parts for step in part[2]]
        if not steps:
            raise WorkloadError("nothing was recorded: no step has ended")
        tokens_S = np.array([step.num_tokens for step in steps])
        return trace_of(
            np.concatenate([part[0] for part in parts]),
            self.space.num_experts,
            requests_N=np.repeat(np.array([step.request for step in steps]), tokens_S),
            probs_NLK=np.concatenate([part[1] for part in parts]),
            steps=(
                np.concatenate([[0], np.cumsum(tokens_S)]),
                np.array([step.decodes for step in steps]),
                np.array([step.admits for step in steps]),
            ),
            about=about,
        )

    def save(self, file: Path) -> None:
        """Write what was recorded. Raises OutputError."""
        save(self.trace(), file, "--routes")

    def _seen(self) -> tuple[Array, Array, list[Noted]]:
        """The rows of steps that have ended, and those steps."""
        table, probs = self._table_NLK.cpu().numpy(), self._probs_NLK.cpu().numpy()
        seen: Array = np.asarray((table >= 0).all(axis=(1, 2)))
        ended, kept, end = [], np.zeros_like(seen), 0
        for step in self._steps:
            start, end = end, end + step.num_tokens
            if end <= len(seen) and seen[start:end].all():
                kept[start:end] = True
                ended.append(step)
        return table[kept], probs[kept], ended

    def _admits(self, num_tokens: int) -> bool:
        """Whether a chunk's experts would enter the slots, were none of them there."""
        if self._prefill is None or not self._prefill.waits_for_router(num_tokens):
            return False
        nothing = torch.zeros(self.space.num_experts, dtype=torch.bool)
        plan = self._prefill.plan(LayerView(0, num_tokens, nothing, ~nothing))
        return bool(plan.admit.any())
