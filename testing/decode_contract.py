"""What must hold of every decode target, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from residency.policies.base import Capability
from residency.policies.cache.lru import Lru
from residency.policies.cache.none import NoCache
from residency.policies.decode import DecodeTarget, Line, Measured
from residency.testing.tiny_model import PROMPT, combination, logits_of, tiny_engine

NUM_LAYERS = 3
MOST = 10  # missing experts of a step
NUM_MEASURED = 200


class DecodeContract:
    """Subclass it in a test module with `target` set, and `params` for a config of your own."""

    target: ClassVar[type[DecodeTarget]]
    params: ClassVar[dict[str, Any]] = {}

    def make(self) -> DecodeTarget:
        return self.target(self.target.Config(**self.params))

    def measured(self) -> Iterator[Measured]:
        """What steps may have taken; parts of it are not known yet."""
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int, most: float = 1) -> torch.Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64) * most

        def line() -> Line:
            fixed_s, each_s = numbers(2, NUM_LAYERS, most=1e-3)
            unknown = numbers(NUM_LAYERS) < 0.3
            return Line(
                fixed_s.masked_fill(unknown, torch.nan), each_s.masked_fill(unknown, torch.nan)
            )

        for _ in range(NUM_MEASURED):
            yield Measured(
                fetched=line(),
                computed=line(),
                fetched_beside=line(),
                computed_beside=line(),
                misses=numbers(NUM_LAYERS, most=MOST),
                steps=numbers(NUM_LAYERS, 3, most=40).long(),
                idle_s=numbers(NUM_LAYERS, 3, most=10),
            )

    def test_of_m_missing_experts_none_to_m_are_fetched(self) -> None:
        target = self.make()
        misses_M = torch.arange(MOST + 1)
        for measured in self.measured():
            quotas = target.quotas(measured, MOST)
            assert quotas.table_LM.shape == (NUM_LAYERS, MOST + 1)
            assert not quotas.table_LM.is_floating_point()
            assert ((quotas.table_LM >= 0) & (quotas.table_LM <= misses_M)).all()
            assert quotas.steps >= 1
            if not target.splits:
                assert (quotas.table_LM == misses_M).all(), "only one that `splits` leaves a part"

    def test_equal_measurements_get_equal_quotas(self) -> None:
        one, other = self.make(), self.make()
        for measured in self.measured():
            first, second = one.quotas(measured, MOST), other.quotas(measured, MOST)
            assert torch.equal(first.table_LM, second.table_LM)
            assert first.steps == second.steps

    def test_its_layers_on_the_host_are_layers(self) -> None:
        assert self.make().host_layers(NUM_LAYERS) <= frozenset(range(NUM_LAYERS))

    def test_results_are_those_of_the_run_with_all_experts_resident(self) -> None:
        """Bit for bit: on the CPU both sides compute alike."""
        prompts = (PROMPT, PROMPT[::-1])
        target = self.make()
        reads_slots = Capability.DECODES_FROM_SLOTS in target.provides
        cache = Lru(Lru.Config(slots=8)) if reads_slots else NoCache(NoCache.Config())
        with tiny_engine() as engine:
            expected = logits_of(engine, prompts)
            with engine.reconfigured(combination(cache, decode=target)):
                assert torch.equal(logits_of(engine, prompts), expected)
