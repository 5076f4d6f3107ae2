"""succession: combined recency and frequency, times what followed the experts of the last token.

Three sources of evidence, in halvings (log2), so that a key is a log of their product:

    log2 CRF          the sum of (1/2)^(age / half_life) over all references of an expert
    follow * log2 F   how often the expert came after those that its layer has just used
    -age * log2(1+a)  a: its age, the steps since its last reference that did without it; experts
                      left alone for long come back less often than any one half-life says

Ages count steps of the expert's own layer, so they rise when the layer has been passed: two experts
that both were used when their layers last ran are of one age, though the step in flight has reached
one of these layers and not yet the other.

F sums, over the experts p that the layer used in its last decode step, the average of "was it used
in the step after p", a moving average over p's uses of weight 1 / memory. It is learned as the run
goes and forgets soon: it is a text's own habits that it follows, not the model's.

CRF: D. Lee et al., IEEE Transactions on Computers 50(12), 2001. A first-order Markov
predictor, for prefetching: D. Joseph and D. Grunwald, "Prefetching using Markov predictors", ISCA
1997; here it only ranks. The blend is ours; benchmarks/README.md tells what each part is worth.

All is done in integers. log2 of x is read off the bits of x as an fp32 number, whose exponent and
mantissa make a piecewise linear one (J. N. Mitchell, IRE Transactions on Electronic Computers
EC-11, 1962): conversions round alike everywhere, so a key has the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from functools import lru_cache

import torch

from residency.policies.base import Conflict
from residency.policies.cache.base import CachePolicy
from residency.policies.step import IdSpace, Phase, Step

BITS = 16  # binary places of counts and averages
ONE = 1 << BITS
LOG_BITS = 23  # binary places of a log2, those of fp32's mantissa
WEIGHT_BITS = 8
MAX_AGE = 1023  # older references count as being of this age
MAX_HALF_LIFE = 128
MAX_WEIGHT = 16


class Succession(CachePolicy):
    """Key = log2 CRF + follow * log2 F - age * log2(1 + steps of its layer that did without it).

    History is kept for evicted experts. A prompt's chunk counts as one reference of each of its
    experts; what follows what is learned in decode alone, from one step to the next.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(CachePolicy.Config):
        """half_life: tokens after which a reference counts for half, 1 to 128.
        follow: weight of what followed the experts of the last token; 0 leaves it out.
        memory: of an expert's uses, over how many what followed is averaged; a power of two.
        age: weight of the time since the last reference, beside its part in the half-life.
        """

        half_life: int = 12
        follow: float = 1.0
        memory: int = 32
        age: float = 0.4

    config: Config

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        config = self.config
        if not 1 <= config.half_life <= MAX_HALF_LIFE:
            reason = f"it is a number of tokens from 1 to {MAX_HALF_LIFE}"
            yield Conflict((f"cache.half_life={config.half_life}",), reason, "cache.half_life=12")
        for key, value, usual in (("follow", config.follow, 1.0), ("age", config.age, 0.4)):
            if not 0 <= value <= MAX_WEIGHT:
                reason = f"the weight is a number from 0 to {MAX_WEIGHT}"
                yield Conflict((f"cache.{key}={value}",), reason, f"cache.{key}={usual}")
        if config.memory not in _memories():
            reason = f"it is a power of two from {_memories()[0]} to {_memories()[-1]}"
            yield Conflict((f"cache.memory={config.memory}",), reason, "cache.memory=32")

    decode_alone = frozenset({"followers"})  # E numbers an expert, too many to move for a prompt

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        config, rows = self.config, space.num_ids + 1
        self.shift = config.memory.bit_length() - 1
        self.gain = torch.tensor(ONE >> self.shift, dtype=torch.int32, device=device)
        self.weight_of_follow = round(config.follow * (1 << WEIGHT_BITS))
        weights = [1 << WEIGHT_BITS, self.weight_of_follow]
        self.weights = torch.tensor(weights, dtype=torch.int64, device=device)
        tables = torch.tensor(_tables(config.half_life, config.age), dtype=torch.int64)
        self.decays, self.age_costs = tables.to(device)
        # CRF as of the last reference, and F; fixed point, never 0.
        self.evidence = torch.ones(rows, 2, dtype=torch.int64, device=device)
        self.last = torch.full_like(self.keys, -MAX_AGE)
        self.merits = torch.zeros_like(self.keys)  # the key without what age takes
        # What age takes once the layer has been passed; 0 for those it used, and for no other.
        self.costs = torch.zeros_like(self.keys)
        self.faded = torch.zeros_like(self.keys)  # CRF before the references of this token
        # By chance alone k of E experts follow.
        chance = max(1, ONE * space.top_k // space.num_experts)
        shape = rows, space.num_experts
        self.followers = torch.full(shape, chance, dtype=torch.int32, device=device)
        self.sources = torch.zeros(rows, dtype=torch.int32, device=device)

    def refresh(self, step: Step) -> None:
        ages = (step.token - self.last).clamp_(1, MAX_AGE)
        self.costs.copy_(self.age_costs[ages])
        self.faded.copy_((self.evidence[:, 0] * self.decays[ages]) >> BITS)
        torch.sub(self.merits, self.age_costs[ages - 1], out=self.keys)

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        first = step.layer * self.space.num_experts
        own = slice(first, first + self.space.num_experts)
        self.evidence[:, 0][ids] = self.faded[ids] + ONE
        self.last[ids] = step.token
        self.costs.index_fill_(0, ids, 0)
        if step.phase is Phase.DECODE:
            self._follow(own)
        else:
            self.sources[own].zero_()
        logs_E2 = self.evidence[own].to(torch.float32).view(torch.int32)
        torch.sum(logs_E2 * self.weights, 1, out=self.merits[own])
        torch.sub(self.merits[own], self.costs[own], out=self.keys[own])

    def _follow(self, own: slice) -> None:
        """Learn that those used now, whose age costs nothing, came after the sources; they are the
        sources from now on. Averages below 2^shift in fixed point stay, so that none comes to 0.
        """
        followers_EE, sources_E = self.followers[own], self.sources[own]
        used_E = self.costs[own] == 0
        changes_EE = used_E * self.gain - (followers_EE >> self.shift)
        followers_EE.addcmul_(changes_EE, sources_E[:, None])
        sources_E.copy_(used_E)
        torch.sum(followers_EE * sources_E[:, None], 0, out=self.evidence[own, 1])

    def rebase(self, tokens: int) -> None:
        self.last.sub_(tokens)


def _memories() -> list[int]:
    return [1 << shift for shift in range(1, 13)]


@lru_cache
def _tables(half_life: int, age_weight: float) -> tuple[list[int], list[int]]:
    """By age from 0 to MAX_AGE: 2^(-age / half_life), and what a key loses, both in fixed point.

    Computed in decimal arithmetic: the same tables on every machine.
    """
    with localcontext() as context:
        context.prec = 30
        log_2, weight = Decimal(2).ln(), Decimal(age_weight)
        halvings = [Decimal(age) / half_life for age in range(MAX_AGE + 1)]
        decays = [_rounded(Decimal(2) ** -each * ONE) for each in halvings]
        logs = [Decimal(1 + age).ln() / log_2 for age in range(MAX_AGE + 1)]
        unit = 1 << (LOG_BITS + WEIGHT_BITS)
        losses = [
            _rounded((each + weight * log) * unit) for each, log in zip(halvings, logs, strict=True)
        ]
    return decays, losses


def _rounded(number: Decimal) -> int:
    return int(number.to_integral_value(ROUND_HALF_EVEN))
