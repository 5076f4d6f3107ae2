"""One generation: prefill in chunks, then a token at a time, streamed as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from residency.runtime.sampling import Sampler
from residency.runtime.sequence import Sequence


@dataclass
class Generation:
    """Prefills and decodes one sequence; afterwards holds its tokens and times (seconds)."""

    sequence: Sequence
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
    def tokens(self, prompt: list[int], max_new_tokens: int) -> Iterator[int]:
        """Yield each new token as it is chosen, a stop token excepted."""
        lanes = self.sequence.runtime.lanes
        self.sequence.restart()
        lanes.take_copy_seconds()
        start = time.perf_counter()
        ids_1T = torch.tensor([prompt], device=lanes.device)
        for chunk in ids_1T.split(self.chunk_tokens, dim=1):
            logits_V = self.sequence.prefill(chunk)
        token = self._next(logits_V)
        self.prefill_s = time.perf_counter() - start
        self.prefill_copy_s = lanes.take_copy_seconds()
        while token not in self.stop_tokens:
            self.token_ids.append(token)
            yield token
            if len(self.token_ids) >= max_new_tokens:
                break
            start = time.perf_counter()
            ids_11 = torch.tensor([[token]], device=lanes.device)
            token = self._next(self.sequence.decode(ids_11))
            self.step_s.append(time.perf_counter() - start)
        self.decode_copy_s = lanes.take_copy_seconds()

    @property
    def stopped(self) -> bool:
        return len(self.step_s) == len(self.token_ids)

    def _next(self, logits_V: torch.Tensor) -> int:
        if self.on_logits is not None:
            self.on_logits(logits_V.clone())
        return int(self.sampler(logits_V))


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
