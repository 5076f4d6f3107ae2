"""Choosing the next token: greedy, or temperature and nucleus (top-p) sampling with a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from residency.policies.base import Conflict


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
    """Draws tokens; the same seed and logits give the same tokens on the same device."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The next token, an int64 scalar tensor, from the logits [V] of the last position."""
        if self.sampling.temperature == 0:
            return logits_V.argmax()
        probs_V = (logits_V.float() / self.sampling.temperature).softmax(dim=-1)
        if self.sampling.top_p < 1:
            probs_V = _nucleus(probs_V, self.sampling.top_p)
        return torch.multinomial(probs_V, 1, generator=self._generator)[0]


def _nucleus(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the likeliest tokens that reach top_p together; at least one stays."""
    sorted_V, order_V = probs_V.sort(descending=True)
    before_V = sorted_V.cumsum(dim=-1) - sorted_V
    kept_V = torch.where(before_V < top_p, sorted_V, 0.0)
    return torch.zeros_like(probs_V).scatter_(0, order_V, kept_V)
