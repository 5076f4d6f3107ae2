"""Choosing the next token: greedy, or temperature and nucleus (top-p) sampling with a seed."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import torch

from residency.policies.base import Conflict

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: no two runs share their sequences'


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens with that probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def faults(self) -> Iterator[Conflict]:
        if not self.temperature >= 0:
            key, reason = f"workload.temperature={self.temperature}", "it must be 0 or more"
            yield Conflict((key,), reason, "workload.temperature=0.8")
        if not 0 < self.top_p <= 1:
            key, reason = f"workload.top_p={self.top_p}", "it must be above 0 and at most 1"
            yield Conflict((key,), reason, "workload.top_p=0.95")
        if not 0 <= self.seed < 1 << 63:
            key, reason = f"workload.seed={self.seed}", "it must be from 0 to 2^63 - 1"
            yield Conflict((key,), reason, "workload.seed=0")
        if self.temperature == 0 and self.top_p < 1:
            key, reason = (
                f"workload.top_p={self.top_p}",
                "greedy decoding (temperature 0) ignores it",
            )
            yield Conflict((key,), reason, "workload.temperature=0.8")


class Sampler:
    """Draws tokens; the same seed and logits give the same tokens on the same device.

    Each sequence has a generator of its own, so its draws do not depend on its company.
    """

    def __init__(self, sampling: Sampling, device: torch.device, num_sequences: int = 1) -> None:
        self.sampling = sampling
        self._generators = [
            torch.Generator(device).manual_seed(seed_of(sampling.seed, index))
            for index in range(num_sequences)
        ]

    def __call__(self, logits_BV: torch.Tensor, sequences: Ids[int]) -> torch.Tensor:
        """The next token of each of B sequences, int64 [B], from the logits [B, V] of its last."""
        if self.sampling.temperature == 0:
            return logits_BV.argmax(dim=-1)
        drawn = [self._draw(*pair) for pair in zip(logits_BV, sequences, strict=True)]
        return torch.cat(drawn)

    def _draw(self, logits_V: torch.Tensor, index: int) -> torch.Tensor:
        probs_V = (logits_V.float() / self.sampling.temperature).softmax(dim=-1)
        if self.sampling.top_p < 1:
            probs_V = _nucleus(probs_V, self.sampling.top_p)
        return torch.multinomial(probs_V, 1, generator=self._generators[index])


class Forced:
    """Gives the tokens of one sequence that are known already, whatever the logits."""

    def __init__(self, tokens: Ids[int], device: torch.device) -> None:
        self._tokens = iter(torch.tensor(tokens, dtype=torch.int64, device=device).split(1))

    def __call__(self, logits_BV: torch.Tensor, sequences: Ids[int]) -> torch.Tensor:
        """The next one, int64 [1]."""
        token_1: torch.Tensor = next(self._tokens)
        return token_1


def seed_of(seed: int, index: int) -> int:
    """The seed of a sequence of a batch; the first one's is the run's own."""
    return (seed + index * _SEED_STEP) % (1 << 63)


def _nucleus(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the likeliest tokens that reach top_p together; at least one stays."""
    sorted_V, order_V = probs_V.sort(descending=True)
    before_V = sorted_V.cumsum(dim=-1) - sorted_V
    kept_V = torch.where(before_V < top_p, sorted_V, 0.0)
    return torch.zeros_like(probs_V).scatter_(0, order_V, kept_V)
