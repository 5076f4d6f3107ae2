"""lfu: least frequently used, with ageing: all counts are halved every `half_life` tokens.

Without ageing an expert that one text used often stays long after that text has ended. Halving all
counters at a fixed interval is the reset of G. Einziger, R. Friedman and B. Manes, "TinyLFU: a
highly efficient cache admission policy", ACM Transactions on Storage 13(4), 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from residency.policies.base import Conflict
from residency.policies.cache.base import CachePolicy
from residency.policies.step import IdSpace, Step

TOKEN_BITS = 40  # of a key's 63 bits, for the time of the last reference, which breaks ties
MAX_COUNT = (1 << (63 - TOKEN_BITS)) - 1
MAX_SHIFT = 63 - TOKEN_BITS  # leaves nothing of any count


class Lfu(CachePolicy):
    """Key = (references, halved so often as an age has begun since, token of the last reference).

    Ages begin at multiples of half_life; halving rounds down. History is kept for evicted experts.
    Counts stop at 2^23 - 1.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(CachePolicy.Config):
        """half_life: tokens after which all counts are halved; 0 never halves them."""

        half_life: int = 64

    config: Config

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        if self.config.half_life < 0:
            key, reason = f"cache.half_life={self.config.half_life}", "it is a number of tokens"
            yield Conflict((key,), reason, "cache.half_life=64")

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        self.ages = torch.zeros_like(self.keys)  # to which the counts are up to date

    def refresh(self, step: Step) -> None:
        if not self.config.half_life:
            return
        age = step.token // self.config.half_life
        counts = (self.keys >> TOKEN_BITS) >> (age - self.ages).clamp_(0, MAX_SHIFT)
        last = self.keys & ((1 << TOKEN_BITS) - 1)
        self.keys.copy_((counts << TOKEN_BITS) | last)
        self.ages.copy_(age.expand_as(self.ages))

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        counts = ((self.keys[ids] >> TOKEN_BITS) + 1).clamp_(max=MAX_COUNT)
        self.keys[ids] = (counts << TOKEN_BITS) | step.token
