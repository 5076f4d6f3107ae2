"""Plans: every mode's is valid for any residents and routes; the executor refuses others."""

import pytest
import torch
from conftest import tiny_engine
from hypothesis import given
from hypothesis import strategies as st

from residency.conf.build import build_part
from residency.conf.options import option_names, option_node
from residency.policies.errors import PolicyError
from residency.policies.prefill import LayerView, Plan, PrefillMode

NUM_EXPERTS = 8
MODES = {
    name: build_part("prefill", option_node("prefill", name)) for name in option_names("prefill")
}
PROMPT = list(range(3, 20))

masks = st.lists(st.booleans(), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS).map(torch.tensor)


@pytest.mark.parametrize("name", MODES)
@given(num_tokens=st.integers(1, 600), resident=masks, routed=masks)
def test_a_plan_names_what_is_needed_once_and_reads_only_residents(
    name, num_tokens, resident, routed
):
    mode = MODES[name]
    waits = mode.waits_for_router(num_tokens)
    before = resident.clone()
    plan = mode.plan(LayerView(0, num_tokens, resident, routed if waits else None))
    named = plan.times_named()
    needed = routed if waits else torch.ones_like(resident)
    assert (named <= 1).all()
    assert (named[needed] == 1).all()
    assert not ((plan.in_place | plan.copy) & ~resident).any()
    assert waits or not plan.admit.any()
    assert torch.equal(resident, before)


@given(num_tokens=st.integers(1, 600))
def test_demand_waits_for_the_router_up_to_its_limit(num_tokens):
    mode = MODES["demand"]
    assert mode.waits_for_router(num_tokens) == (num_tokens <= mode.config.max_tokens)


class Broken(PrefillMode):
    """Plans as `make(view)` says."""

    def __init__(self, waits, make):
        super().__init__(PrefillMode.Config())
        self.waits, self.make = waits, make

    def waits_for_router(self, num_tokens):
        return self.waits

    def plan(self, view):
        return self.make(view)


def everything(view):
    return torch.ones_like(view.resident)


def all_but_expert_3(view):
    mask = everything(view)
    mask[3] = False
    return mask


BROKEN = {
    "twice ahead": (False, lambda v: dict(stream=everything(v), copy=v.resident), "more than once"),
    "twice late": (True, lambda v: dict(stream=v.routed, admit=v.routed), "more than once"),
    "forgotten ahead": (False, lambda v: dict(stream=all_but_expert_3(v)), "forgets expert 3"),
    "forgotten late": (True, lambda v: {}, "forgets expert"),
    "absent, copied": (False, lambda v: dict(copy=everything(v)), "a slot it is not in"),
    "absent, in place": (True, lambda v: dict(in_place=v.routed), "a slot it is not in"),
    "admitted ahead": (False, lambda v: dict(admit=everything(v)), "before the router"),
}


@pytest.fixture(scope="module")
def engine(checkpoint):
    with tiny_engine(checkpoint, "prefill=hit_d2d", "cache.slots=5") as engine:
        yield engine


def logits(engine):
    seen = []
    engine.generate(PROMPT, max_new_tokens=3, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused_and_the_engine_goes_on(engine, name, monkeypatch):
    waits, make, words = BROKEN[name]
    expected = logits(engine)  # leaves residents behind as well
    mode = Broken(waits, lambda view: Plan.of(NUM_EXPERTS, **make(view)))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime._prefill, "mode", mode)
        with pytest.raises(PolicyError, match=rf"^prefill=\w+: the plan for layer 0 .*{words}"):
            logits(engine)
    assert torch.equal(logits(engine), expected)


def test_a_plan_of_any_kind_that_is_valid_is_run(engine, monkeypatch):
    """Copies, streams and admissions in one plan: the refusals above are not for being unusual."""
    expected = logits(engine)

    def mixed(view):
        even = torch.arange(NUM_EXPERTS) % 2 == 0
        return Plan.of(
            NUM_EXPERTS,
            copy=view.resident,
            stream=~view.resident & even,
            admit=~view.resident & ~even,
        )

    monkeypatch.setattr(engine.runtime._prefill, "mode", Broken(True, mixed))
    assert torch.equal(logits(engine), expected)
