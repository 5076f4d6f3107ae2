"""One generation: prefill in chunks, then a token at a time, streamed as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

from residency.policies.step import Phase
from residency.runtime.offload import OffloadRuntime
from residency.runtime.sampling import Sampler

CONTEXT_STEP = 256  # KV capacity is a multiple of this, so that few shapes occur


@dataclass
class Generation:
    """Prefills and decodes one sequence; afterwards holds its tokens and times (seconds)."""

    model: PreTrainedModel
    runtime: OffloadRuntime
    sampler: Sampler
    chunk_tokens: int
    stop_tokens: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    prefill_copy_s: float = 0.0
    decode_copy_s: float = 0.0
    on_logits: Callable[[torch.Tensor], None] | None = None  # the logits [V] behind each token

    @torch.inference_mode()
    def tokens(self, prompt: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield each new token as it is chosen, a stop token excepted."""
        device = self.runtime.lanes.device
        cache = kv_cache(self.model, len(prompt) + max_new_tokens)
        start = time.perf_counter()
        self.runtime.lanes.take_copy_seconds()
        for chunk in torch.tensor([list(prompt)], device=device).split(self.chunk_tokens, dim=1):
            logits_V = self._forward(Phase.PREFILL, chunk, cache)
        token = self._next(logits_V)
        self.prefill_s = time.perf_counter() - start
        self.prefill_copy_s = self.runtime.lanes.take_copy_seconds()
        while token not in self.stop_tokens:
            self.token_ids.append(token)
            yield token
            if len(self.token_ids) >= max_new_tokens:
                break
            start = time.perf_counter()
            step = torch.tensor([[token]], device=device)
            token = self._next(self._forward(Phase.DECODE, step, cache))
            self.step_s.append(time.perf_counter() - start)
        self.decode_copy_s = self.runtime.lanes.take_copy_seconds()

    @property
    def stopped(self) -> bool:
        return len(self.step_s) == len(self.token_ids)

    def _forward(self, phase: Phase, ids_1T: torch.Tensor, cache: Any) -> torch.Tensor:
        with self.runtime.step(phase, ids_1T.shape[1]):
            output = self.model(ids_1T, cache=cache, use_cache=True, logits_to_keep=1)
        logits_V: torch.Tensor = output.logits[0, -1]
        return logits_V

    def _next(self, logits_V: torch.Tensor) -> int:
        if self.on_logits is not None:
            self.on_logits(logits_V)
        return int(self.sampler(logits_V))


def kv_cache(model: PreTrainedModel, num_tokens: int) -> StaticCache:
    capacity = -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
    return StaticCache(config=model.config, max_cache_len=capacity)


def text_pieces(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Decode a token stream piece by piece, holding back characters that are not complete yet."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("�"):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(ids, skip_special_tokens=True)[len(shown) :]
    if rest:
        yield rest
