"""lrfu: least recently/frequently used, a spectrum from LFU (decay 0) to LRU (decay 1).

D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least
frequently used policies", IEEE Transactions on Computers 50(12), 2001. The combined recency and
frequency of block b at time t is CRF(b) = sum of (1/2)^(decay * (t - t_i)) over its references.

All CRFs decay by one common factor, so their order is that of the time-invariant
S(b) = log2(sum 2^(decay * t_i)), and only referenced blocks change:

    first reference  S = decay * t
    later            m = max(S, decay * t);  S = m + log2(1 + 2^-|S - decay * t|)

The first is the second's limit for an S far below, so one rule serves both.

A reference may weigh less than 1: with weight w it adds w * 2^(decay * t), so decay * t gives way
to decay * t + log2(w). Here references made in prefill have a weight w of their own. All S are
kept larger by -log2(w), which changes no order: prefill adds 2^(decay * t), decode
2^(decay * t - log2(w)), no S is negative and so none is below that of an expert never referenced.

Floating logarithms differ between vector, scalar and GPU code, and fp64 loses the order at large t.
Here S is a fixed-point integer, updated by integer operations alone: the same bits everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from functools import lru_cache
from typing import ClassVar, TypeVar

import torch

from residency.policies.base import Conflict
from residency.policies.cache.base import CachePolicy
from residency.policies.step import IdSpace, Phase, Step

TOKEN_BITS = 24  # of a key's 63 bits, for the time of the last reference, which breaks ties
DECAY_BITS = 32  # binary places kept of the decay
STEP_BITS = 8  # the gain table has 2^8 entries per unit of distance, interpolated between
MAX_FRACTION_BITS = 24
HISTORIES = ("kept", "reset")
NEVER = -(1 << 62)  # S before any reference: below every other by more than the gains reach

Time = TypeVar("Time", int, torch.Tensor)


class Lrfu(CachePolicy):
    """Key = (S, token of the last reference), packed; ties go to the lowest id.

    A reference sets S above max(S, decay * t + log2(weight)), by one unit in the last place at
    least: where all weigh alike, with decay 0 the order is that of reference counts, with decay 1 a
    later last reference never ranks lower. History is kept for experts that were evicted, unless
    the config says that it is reset: then an expert that comes back starts anew, as where only what
    is cached can be described.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(CachePolicy.Config):
        """decay: how fast old references fade, per token; 0 counts (LFU), 1 is LRU.
        history: whether an evicted expert's references are "kept" or "reset".
        prefill_weight: of a reference made in prefill, above 0; one made in decode weighs 1.
        """

        decay: float = 0.1
        history: str = "kept"
        prefill_weight: float = 1.0

    config: Config
    horizon: ClassVar[int | None] = 1 << TOKEN_BITS

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        if not 0 <= self.config.decay <= 1:
            reason = "the decay is a number from 0 (LFU) to 1 (LRU)"
            yield Conflict((f"cache.decay={self.config.decay}",), reason, "cache.decay=0.1")
        if self.config.history not in HISTORIES:
            key, reason = f"cache.history={self.config.history}", f"it is {' or '.join(HISTORIES)}"
            yield Conflict((key,), reason, "cache.history=kept")
        if not 0 < self.config.prefill_weight <= 1:
            key = f"cache.prefill_weight={self.config.prefill_weight}"
            reason = "the weight is a number above 0 and at most 1 (as much as in decode)"
            yield Conflict((key,), reason, "cache.prefill_weight=1.0")

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        self.follows_moves = self.config.history == "reset"
        self.fraction_bits = _fraction_bits(self.config.decay, self.config.prefill_weight)
        self.scaled_decay = round(self.config.decay * (1 << DECAY_BITS))
        self._lead = _halvings(self.config.prefill_weight, self.fraction_bits)
        self._gain_table = _gain_table(self.fraction_bits)
        self._last_entry = len(self._gain_table) - 1
        self.gains = torch.tensor(self._gain_table, dtype=torch.int64, device=device)
        self.scores = torch.full_like(self.keys, NEVER)

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        now = self._scaled(step.token) + self.lead(step.phase)
        scores = self._advance(self.scores[ids], now)
        self.scores[ids] = scores
        self.keys[ids] = (scores << TOKEN_BITS) | step.token

    def lead(self, phase: Phase) -> int:
        """What a reference of `phase` adds to decay * t, in fixed point: decode's are ahead of
        prefill's by -log2(prefill_weight).
        """
        return self._lead if phase is Phase.DECODE else 0

    def moved(self, entered: torch.Tensor, evicted: torch.Tensor) -> None:
        """Forget the evicted; called where history is reset."""
        self.scores.index_fill_(0, evicted, NEVER)
        self.keys.index_fill_(0, evicted, 0)

    def rebase(self, tokens: int) -> None:
        token_mask = (1 << TOKEN_BITS) - 1
        last = (self.keys & token_mask).sub(tokens).clamp_(min=0)
        known = self.scores != NEVER
        scores = self.scores.sub(self._scaled(tokens)).clamp_(min=0)
        self.scores.copy_(torch.where(known, scores, NEVER))
        self.keys.copy_(torch.where(known, (scores << TOKEN_BITS) | last, 0))

    def _scaled(self, token: Time) -> Time:
        """decay * token in fixed point."""
        return (token * self.scaled_decay) >> (DECAY_BITS - self.fraction_bits)

    def _advance(self, scores: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """S after a reference at decay * t + lead = now; int64 [N]."""
        distance = (scores - now).abs()
        shift = self.fraction_bits - STEP_BITS
        gain, slope = self.gains[(distance >> shift).clamp_(max=self._last_entry)].unbind(1)
        fall = (slope * (distance & ((1 << shift) - 1))) >> shift
        return torch.maximum(scores, now) + gain - fall

    def advance(self, score: int, token: int, phase: Phase = Phase.DECODE) -> int:
        """The scalar form: S after a reference, given S before (NEVER: no reference yet)."""
        now = self._scaled(token) + self.lead(phase)
        distance = abs(score - now)
        shift = self.fraction_bits - STEP_BITS
        gain, slope = self._gain_table[min(distance >> shift, self._last_entry)]
        return max(score, now) + gain - ((slope * (distance & ((1 << shift) - 1))) >> shift)


def _fraction_bits(decay: float, weight: float) -> int:
    """Binary places of S that leave room for its integer part and the last token in 63 bits.

    The integer part reaches decay * horizon + log2(horizon) - log2(weight); the last is below 1,076
    for any float, so that at least 14 places are left.
    """
    lead = _halvings(weight, 0) + 1 if weight < 1 else 0
    highest = math.ceil(decay * (1 << TOKEN_BITS)) + TOKEN_BITS + 2 + lead
    integer_bits = highest.bit_length()
    return min(MAX_FRACTION_BITS, 63 - TOKEN_BITS - integer_bits)


def _halvings(weight: float, fraction_bits: int) -> int:
    """-log2(weight) in fixed point, rounded; 0 for weight 1. The same on every machine."""
    with localcontext() as context:
        context.prec = 50
        halvings = -Decimal(weight).ln() / Decimal(2).ln() * (1 << fraction_bits)
        return int(halvings.to_integral_value(ROUND_HALF_EVEN))


@lru_cache
def _gain_table(fraction_bits: int) -> tuple[tuple[int, int], ...]:
    """log2(1 + 2^-d) in fixed point for d = 0, 2^-8, 2 * 2^-8, ... until it falls to one unit,
    each with how much it falls to the next; the last entry stands for all larger d. No gain is
    less than one unit, between entries neither.

    Computed in decimal arithmetic: the same table on every machine.
    """
    with localcontext() as context:
        context.prec = 30
        log_2, scale = Decimal(2).ln(), Decimal(1 << fraction_bits)
        num_entries = ((fraction_bits + 2) << STEP_BITS) + 1
        powers = (Decimal(2) ** (Decimal(-i) / (1 << STEP_BITS)) for i in range(num_entries))
        gains = [max(1, int((1 + power).ln() / log_2 * scale)) for power in powers]
    falls = [left - right for left, right in itertools.pairwise(gains)]
    return tuple(zip(gains, [*falls, 0], strict=True))
