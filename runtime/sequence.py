"""A sequence: the keys and values of one conversation, and the model's steps over them.

Where the decode step needs no host (`OffloadRuntime.capturable`), its first run is eager, which
compiles every kernel, and all later ones replay one CUDA graph. Capturing runs nothing, so no
state has to be put back. The graph holds for the sequence's tensors; they are kept for the next
generation, and the graph with them.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, StaticCache

from residency.policies.step import Phase
from residency.runtime.offload import OffloadRuntime

CAPACITY_STEP = 256  # few capacities, so that graphs are reused


class Sequence:
    """Room for `capacity` tokens, and the position in it."""

    def __init__(self, model: PreTrainedModel, runtime: OffloadRuntime, capacity: int) -> None:
        self.model = model
        self.runtime = runtime
        self.capacity = capacity
        self._cache = StaticCache(config=model.config, max_cache_len=capacity)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0

    def restart(self) -> None:
        """Forget all tokens."""
        self._cache.reset()
        self.runtime.position = 0

    def prefill(self, ids_1T: torch.Tensor) -> torch.Tensor:
        """Logits [V] behind the last of T tokens, int64 [1, T]."""
        with self.runtime.step(Phase.PREFILL, ids_1T.shape[1]):
            return self._forward(ids_1T)

    def decode(self, ids_11: torch.Tensor) -> torch.Tensor:
        """Logits [V] behind one token, int64 [1, 1]. Overwritten by the next decode."""
        if not self.runtime.capturable or self._eager_steps == 0:
            self._eager_steps += 1
            with self.runtime.step(Phase.DECODE, 1):
                return self._forward(ids_11)
        if self._graph is None:
            self._capture(ids_11)
        assert self._graph is not None, "captured just now"
        self._ids_11.copy_(ids_11)
        self.runtime.prepare(Phase.DECODE, 1)
        self._graph.replay()
        self.runtime.position += 1
        return self._logits_V

    def _capture(self, ids_11: torch.Tensor) -> None:
        self._ids_11 = ids_11.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), self.runtime.recorded(Phase.DECODE, 1):
            self._logits_V = self._forward(self._ids_11)
        self._graph = graph

    def _forward(self, ids_1T: torch.Tensor) -> torch.Tensor:
        output = self.model(ids_1T, cache=self._cache, use_cache=True, logits_to_keep=1)
        logits_V: torch.Tensor = output.logits[0, -1]
        return logits_V


def capacity_for(num_tokens: int) -> int:
    return -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
