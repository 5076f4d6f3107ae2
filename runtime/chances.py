"""Chances: how likely a chunk is to be routed to each expert, by the chunks before it.

A token goes to expert e with probability p, a running share. If tokens were independent, T of them
would reach it with 1 - (1 - p)^T. They are not: neighbours share experts. So T counts for `s * T`,
with s fitted, for each length, to the numbers of distinct experts seen.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from residency.policies.step import IdSpace

PRIOR_TOKENS = 64  # the weight of "all alike", in tokens
MEMORY_TOKENS = 4096  # older tokens fade
CORRECTION = 0.1  # of the error in distinct experts, what one layer corrects of s
SPREAD_LAYERS = 4  # where nobody asked for the chances, every fourth layer does
LEAST_SPREAD, MOST_SPREAD = 0.01, 2.0
SHARE_CORRECTION = 0.1  # of the shares of right guesses, per layer of a chunk

FloatArray = np.ndarray


class Chances:
    """Running shares of one model's experts, and how far guesses were right."""

    def __init__(self, space: IdSpace) -> None:
        self._space = space
        alike = space.top_k / space.num_experts
        self._share_LE = np.full((space.num_layers, space.num_experts), alike)
        self._seen_L = np.full(space.num_layers, PRIOR_TOKENS)
        self._spread: dict[int, float] = defaultdict(lambda: 1.0)
        # Of the experts that a guess named, and of the others by what was expected of those.
        self._named: dict[int, float] = defaultdict(lambda: 0.5)
        self._unnamed: dict[int, float] = defaultdict(lambda: 1.0)
        self._expectations: dict[int, float] = {}  # by layer, what its next routes are held against
        self._guesses: dict[int, tuple[FloatArray, FloatArray]] = {}

    def of(self, layer: int, num_tokens: int, guessed: torch.Tensor | None) -> torch.Tensor:
        """float64 [E]. guessed: int64 [E], how many tokens named each; None for no guess."""
        chance_E = self._expected(layer, num_tokens)
        self._expectations[layer] = float(chance_E.sum())
        if guessed is not None:
            named_E, size = guessed.numpy() > 0, num_tokens.bit_length()
            self._guesses[layer] = named_E, chance_E
            others_E = np.minimum(chance_E * self._unnamed[size], 1)
            chance_E = np.where(named_E, self._named[size], others_E)
        return torch.from_numpy(chance_E)

    def cycle(self, num_tokens: int) -> float:
        """Experts that a chunk is expected to be routed to, over all layers."""
        return float(self._expected(slice(None), num_tokens).sum())

    def learn(self, layer: int, ids_TK: torch.Tensor, num_distinct: int) -> None:
        """Take in one layer's routes, int64 [T, K] on the host."""
        num_tokens, size = len(ids_TK), len(ids_TK).bit_length()
        expected = self._expectations.pop(layer, None)
        if expected is None and layer % SPREAD_LAYERS == 0:
            expected = self._expected(layer, num_tokens).sum()
        if expected is not None:
            error = num_distinct / max(expected, 1e-9) - 1
            spread = self._spread[size] * (1 + CORRECTION * error)
            self._spread[size] = min(max(spread, LEAST_SPREAD), MOST_SPREAD)
        count_E = np.bincount(ids_TK.numpy().ravel(), minlength=self._space.num_experts)
        if (guess := self._guesses.pop(layer, None)) is not None:
            self._judge(size, count_E > 0, *guess)
        seen = min(self._seen_L[layer], MEMORY_TOKENS)
        weight = num_tokens / (seen + num_tokens)
        self._share_LE[layer] += weight * (count_E / num_tokens - self._share_LE[layer])
        self._seen_L[layer] += num_tokens

    def _judge(
        self, size: int, routed_E: FloatArray, named_E: FloatArray, chance_E: FloatArray
    ) -> None:
        if named_E.any():
            right = routed_E[named_E].mean()
            self._named[size] += SHARE_CORRECTION * (right - self._named[size])
        if not named_E.all():
            ratio = routed_E[~named_E].mean() / max(chance_E[~named_E].mean(), 1e-9)
            self._unnamed[size] += SHARE_CORRECTION * (ratio - self._unnamed[size])

    def _expected(self, layer: int | slice, num_tokens: int) -> FloatArray:
        spread = self._spread[num_tokens.bit_length()]
        share = np.minimum(self._share_LE[layer], 1 - 1e-12)
        chance: FloatArray = -np.expm1(num_tokens * spread * np.log1p(-share))
        return chance
