"""Recording routes: which experts each token went to, written on the device as it happens.

N tokens, L layers, K experts per token, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from residency.policies.errors import WorkloadError
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.prefill_entries import Entries
from residency.runtime.traces.trace import ALL, Array, Trace, trace_of
from residency.runtime.traces.writing import save


class Noted(NamedTuple):
    """A step: the tokens it takes, its phase, the tokens of its prompt behind it, its request, and
    of each layer of a prompt how its experts entered the slots.
    """

    num_tokens: int
    decodes: bool
    behind: int
    request: int
    entries: dict[int, Entries]

    @property
    def admits(self) -> bool:
        return self.decodes or any(entries.admits for entries in self.entries.values())


class RouteRecorder:
    """Room for the routes of `num_tokens` tokens behind token `after` of the engine's clock."""

    def __init__(
        self,
        space: IdSpace,
        num_tokens: int,
        after: torch.Tensor,
        device: torch.device,
    ) -> None:
        self.space = space
        self._clock = after
        self._first = after.clone() + 1
        shape = (num_tokens, space.num_layers, space.top_k)
        self._table_NLK = torch.full(shape, -1, dtype=torch.int16, device=device)
        self._probs_NLK = torch.zeros(shape, dtype=torch.float16, device=device)
        self._steps: list[Noted] = []
        self._request = 0
        self._kept: list[tuple[Array, Array, list[Noted]]] = []

    def begin(self, phase: Phase, num_tokens: int, behind: int = 0) -> None:
        """The host's part, before each step, replayed ones included.

        behind: tokens of the prompt that come after the chunk.
        """
        decodes = phase is Phase.DECODE
        self._steps.append(Noted(num_tokens, decodes, behind, self._request, {}))

    def note(self, layer: int, entries: Entries) -> None:
        """How the experts of a layer of the prompt in flight entered the slots."""
        self._steps[-1].entries[layer] = entries

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
            behind_S=np.array([step.behind for step in steps]),
            passed_P3=_rows(steps, lambda entries: entries.passed if entries.admits else [ALL]),
            landed_P3=_rows(steps, lambda entries: entries.landed),
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


def _rows(steps: list[Noted], named: Callable[[Entries], list[int]]) -> Array:
    """int32 [P, 3] (step, layer, expert) of prompts that admit."""
    found = [
        (number, layer, expert)
        for number, step in enumerate(steps)
        if step.admits
        for layer, entries in sorted(step.entries.items())
        for expert in named(entries)
    ]
    return np.array(found, dtype=np.int32).reshape(-1, 3)
