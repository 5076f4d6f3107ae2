"""What must hold of every prefill mode, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch

from residency.policies.cache.lru import Lru
from residency.policies.prefill import Costs, LayerView, Plan, PrefillMode
from residency.policies.prefill.always_stream import AlwaysStream
from residency.testing.tiny_model import PROMPT, combination, logits_of, tiny_engine

NUM_EXPERTS = 8
NUM_VIEWS = 300
MOST_TOKENS = 600


class PrefillContract:
    """Subclass it in a test module with `mode` set, and `params` for a config of your own."""

    mode: ClassVar[type[PrefillMode]]
    params: ClassVar[dict[str, Any]] = {}

    def make(self) -> PrefillMode:
        return self.mode(self.mode.Config(**self.params))

    def views(self) -> Iterator[tuple[LayerView, torch.Tensor, torch.Tensor]]:
        """Views before the router has spoken, whom it routes to, and who of any stream arrives."""
        generator = torch.Generator().manual_seed(0)

        def number(most: int) -> int:
            return int(torch.randint(most + 1, (), generator=generator))

        def mask() -> torch.Tensor:
            share = float(torch.rand((), generator=generator)) * 1.4 - 0.2  # none and all, too
            return torch.rand(NUM_EXPERTS, generator=generator) < share

        for _ in range(NUM_VIEWS):
            seconds = torch.rand(2, generator=generator).tolist()
            guessed = torch.randint(9, (NUM_EXPERTS,), generator=generator)
            chances = torch.rand(NUM_EXPERTS, generator=generator, dtype=torch.float64)
            view = LayerView(
                layer=number(3),
                num_tokens=1 + number(MOST_TOKENS),
                resident=mask(),
                welcome=mask(),
                guessed=guessed if number(1) else None,
                chances=chances,
                cycle=float(number(40)),
                num_sharing=1 + number(3),
                num_slots=20,
                num_empty=number(20),
                costs=Costs(*seconds) if number(1) else None,
            )
            yield view, mask(), mask()

    def test_every_plan_reads_each_needed_expert_from_one_place(self) -> None:
        mode = self.make()
        for view, routed, arrived in self.views():
            before = _copied(view)
            ahead = mode.ahead(view)
            _check_masks(ahead.plan)
            early = ahead.plan.times_named()
            assert (early <= 1).all(), "an expert is named twice ahead"
            assert not ahead.plan.admit.any(), "admitted before the router has spoken"
            _check_residents(ahead.plan, view)
            if not ahead.waits:
                assert (early == 1).all(), "an expert is forgotten, and nothing waits"
                continue
            landed = arrived & (ahead.plan.stream | ahead.plan.copy)
            told = replace(view, routed=routed, landed=landed)
            plan = mode.plan(told)
            _check_masks(plan)
            _check_residents(plan, view)
            read = ahead.plan.in_place.int() + landed.int() + plan.times_named()
            read -= (plan.admit & landed).int()  # kept: it does not cross the link again
            assert (plan.times_named() <= 1).all() and (read <= 1).all(), "an expert is named twice"
            assert (read[routed] == 1).all(), "a routed expert is forgotten"
            assert not (plan.admit & ~view.welcome).any(), "admitted, and not welcome"
            for name, value in _copied(view).items():
                assert torch.equal(value, before[name]), f"the mode changed the view's {name}"

    def test_equal_views_get_equal_plans(self) -> None:
        one, other = self.make(), self.make()
        for view, routed, _ in self.views():
            first, second = one.ahead(view), other.ahead(view)
            assert first.waits == second.waits
            _assert_equal(first.plan, second.plan)
            if first.waits:
                told = replace(view, routed=routed, landed=torch.zeros_like(routed))
                _assert_equal(one.plan(told), other.plan(told))

    def test_results_are_those_of_the_run_with_all_experts_resident(self) -> None:
        """Bit for bit, from an empty pool and from a used one, in one chunk and in several."""
        prompts, chunk_tokens = (PROMPT, PROMPT[::-1][:9], PROMPT), 12
        stream, mode = AlwaysStream(AlwaysStream.Config(chunk_tokens=chunk_tokens)), self.make()
        mode.config = replace(mode.config, chunk_tokens=chunk_tokens)
        with tiny_engine(combination(prefill=stream)) as engine:
            expected = logits_of(engine, prompts)
            with engine.reconfigured(combination(Lru(Lru.Config(slots=10)), mode)):
                assert torch.equal(logits_of(engine, prompts), expected)


def _copied(view: LayerView) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(view, field.name) for field in fields(view)}
    return {n: v.clone() for n, v in values.items() if isinstance(v, torch.Tensor)}


def _check_masks(plan: Plan) -> None:
    for field in fields(Plan):
        mask = getattr(plan, field.name)
        assert (mask.dtype, mask.shape) == (torch.bool, (NUM_EXPERTS,)), f"{field.name} is no mask"
        assert mask.device.type == "cpu", f"{field.name} is not on the CPU"


def _check_residents(plan: Plan, view: LayerView) -> None:
    absent = (plan.in_place | plan.copy) & ~view.resident
    assert not absent.any(), "read from a slot that it is not in"


def _assert_equal(first: Plan, second: Plan) -> None:
    for field in fields(Plan):
        same = torch.equal(getattr(first, field.name), getattr(second, field.name))
        assert same, f"{field.name} differs for equal views"
