"""A sequence: the keys and values of one conversation, and the model's steps over them.

Where the decode step needs no host (`OffloadRuntime.capturable`), its first run is eager, which
compiles every kernel, and all later ones replay one CUDA graph. Capturing runs nothing, so no
state has to be put back. The graph holds for the sequence's tensors; they are kept for the next
generation, and the graph with them.

Legend: T tokens of a chunk, B sequences of a decode step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, StaticCache

from residency.policies.errors import ResidencyError
from residency.policies.step import Phase
from residency.runtime.cache_sizes import can_cut
from residency.runtime.faults import Point
from residency.runtime.offload import OffloadRuntime

BROKEN_BY = (ResidencyError, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt)


class Rows(Protocol):
    """Where prompts are prefilled, one after another, and then decoded side by side, a row each."""

    runtime: OffloadRuntime

    def clear(self) -> None:
        """No row is taken any more."""

    def restart(self) -> None:
        """The next chunk is the first of a prompt."""

    def prefill(self, ids_1T: torch.Tensor, behind: int = 0) -> torch.Tensor:
        """Logits [V] behind the last of T tokens, int64 [1, T].

        behind: tokens of the prompt that come after these.
        """

    def join(self) -> None:
        """The sequence that was prefilled takes the next row."""

    def decode(self, ids_B1: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] behind one token of each row, int64 [B, 1]. Overwritten by the next step.

        B: all rows that are taken.
        """

    def leave(self, row: int) -> None:
        """The sequence in `row` is done; the last row takes its place."""

    def finish(self) -> None:
        """The generation has ended."""


class DecodeStep:
    """The model over one token of each row, in fixed shapes: eager once, then captured.

    pool: memory that graphs share whose results are read before another one runs.
    """

    def __init__(
        self,
        runtime: OffloadRuntime,
        forward: Callable[[torch.Tensor], torch.Tensor],
        pool: Any = None,
    ) -> None:
        self.runtime = runtime
        self.graph: torch.cuda.CUDAGraph | None = None
        self._forward = forward
        self._pool = pool
        self._ran = False

    def __call__(self, ids_B1: torch.Tensor) -> torch.Tensor:
        """One tick of the runtime's clock for all B sequences."""
        if not self.runtime.capturable or not self._ran:
            self._ran = True
            with self.runtime.step(Phase.DECODE, 1):
                return self._forward(ids_B1)
        if self.graph is None:
            with self.runtime.whole(Point.CAPTURE):
                self.graph = self._capture(ids_B1)
        with self.runtime.whole(Point.DECODE):
            self._ids_B1.copy_(ids_B1)
            self.runtime.prepare(Phase.DECODE, 1)
            self.graph.replay()
        self.runtime.position += 1
        return self._logits_BV

    def _capture(self, ids_B1: torch.Tensor) -> torch.cuda.CUDAGraph:
        self._ids_B1 = ids_B1.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.graph(graph, pool=self._pool),
                self.runtime.recorded(Phase.DECODE, 1),
            ):
                self._logits_BV = self._forward(self._ids_B1)
        except RuntimeError as error:
            # The end of a capture that was broken fails in its turn, and hides what broke it.
            if isinstance(error.__context__, BROKEN_BY):
                raise error.__context__ from None
            raise
        return graph


class Sequence:
    """Room for `capacity` tokens; as rows, there is one, decoded where it was prefilled."""

    def __init__(self, model: PreTrainedModel, runtime: OffloadRuntime, capacity: int) -> None:
        self.model = model
        self.runtime = runtime
        self.capacity = capacity
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.held = 0  # tokens that a prompt may follow on; 0 while a generation runs
        self.generations = 0  # begun here: who remembers one knows whether it was the last
        self._step = DecodeStep(runtime, self._forward)

    def renew(self) -> None:
        """Capture the decode step anew: slots have moved. What is held stays."""
        self._step = DecodeStep(self.runtime, self._forward)

    @property
    def num_bytes(self) -> int:
        """What its cache has taken."""
        return sum(tensor.nbytes for layer in self.cache.layers for tensor in _tensors(vars(layer)))

    @property
    def _graph(self) -> torch.cuda.CUDAGraph | None:
        return self._step.graph

    def clear(self) -> None:
        """See `Rows`; what is held is at stake until the generation has ended."""
        self.held = 0
        self.generations += 1

    def restart(self) -> None:
        """Forget all tokens."""
        self.cache.reset()
        self.runtime.position = 0

    def prefill(self, ids_1T: torch.Tensor, behind: int = 0) -> torch.Tensor:
        """Logits [V] behind the last of T tokens, int64 [1, T]."""
        with self.runtime.step(Phase.PREFILL, ids_1T.shape[1], behind):
            return self._forward(ids_1T)[0]

    def join(self) -> None:
        """See `Rows`; nothing moves."""

    def decode(self, ids_11: torch.Tensor) -> torch.Tensor:
        """Logits [1, V] behind one token, int64 [1, 1]. Overwritten by the next decode."""
        return self._step(ids_11)

    def leave(self, row: int) -> None:
        """See `Rows`; `restart` does all of it."""

    def finish(self) -> None:
        """See `Rows`; all tokens that steps have seen may be followed on."""
        self.held = self.runtime.position

    @property
    def can_cut(self) -> bool:
        """Whether it can go back to any earlier length without a snapshot."""
        return all(can_cut(layer) for layer in self.cache.layers)

    def _forward(self, ids_1T: torch.Tensor) -> torch.Tensor:
        output = self.model(ids_1T, cache=self.cache, use_cache=True, logits_to_keep=1)
        logits_1V: torch.Tensor = output.logits[:, -1]
        return logits_1V


def _tensors(state: dict[Any, Any]) -> Iterator[torch.Tensor]:
    """Those of a cache's layer, and of the tables in it."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)
