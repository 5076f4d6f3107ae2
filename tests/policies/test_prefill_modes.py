"""Plans: every mode's is valid for any residents and routes; the executor refuses others."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_engine
from hypothesis import given
from hypothesis import strategies as st

from residency.conf.build import build_part
from residency.conf.options import option_names, option_node
from residency.policies.errors import PolicyError
from residency.policies.prefill import Ahead, Costs, LayerView, Plan, PrefillMode

NUM_EXPERTS = 8
MODES = {
    name: build_part("prefill", option_node("prefill", name)) for name in option_names("prefill")
}
PROMPT = list(range(3, 20))

masks = st.lists(st.booleans(), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS).map(torch.tensor)
counts = st.lists(st.integers(0, 9), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS).map(torch.tensor)
shares = st.lists(st.floats(0, 1), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
seconds = st.floats(1e-6, 1)
views = st.builds(
    LayerView,
    layer=st.integers(0, 3),
    num_tokens=st.integers(1, 600),
    resident=masks,
    welcome=masks,
    guessed=st.none() | counts,
    chances=shares,
    cycle=st.floats(0, 40),
    num_sharing=st.integers(1, 4),
    num_slots=st.just(20),
    num_empty=st.integers(0, 20),
    costs=st.none() | st.builds(Costs, seconds, seconds),
)


@pytest.mark.parametrize("name", MODES)
@given(view=views, routed=masks, arrived=masks)
def test_every_plan_reads_each_needed_expert_from_one_place(name, view, routed, arrived):
    mode = MODES[name]
    before = view.resident.clone()
    ahead = mode.ahead(view)
    early = ahead.plan.times_named()
    assert (early <= 1).all()
    assert not ahead.plan.admit.any()
    assert not ((ahead.plan.in_place | ahead.plan.copy) & ~view.resident).any()
    if not ahead.waits:
        assert (early == 1).all()
        return
    landed = arrived & (ahead.plan.stream | ahead.plan.copy)  # what the ring had no room for is not
    plan = mode.plan(replace(view, routed=routed, landed=landed))
    assert (plan.times_named() <= 1).all()
    read = ahead.plan.in_place.int() + landed.int() + plan.times_named()
    read -= (plan.admit & landed).int()  # kept: it does not cross the link again
    assert (read[routed] == 1).all()
    assert (read <= 1).all()
    assert not (plan.admit & ~view.welcome).any()
    assert not ((plan.in_place | plan.copy) & ~view.resident).any()
    assert torch.equal(view.resident, before)


@given(view=views)
def test_demand_waits_for_the_router_up_to_its_limit(view):
    mode = MODES["demand"]
    assert mode.ahead(view).waits == (view.num_tokens <= mode.config.max_tokens)


@given(view=views)
def test_whole_layers_never_wait_and_differ_in_where_residents_are_read(view):
    plans = {
        name: MODES[name].ahead(view).plan for name in ("always_stream", "hit_d2d", "in_place")
    }
    assert plans["always_stream"].stream.all()
    for name, way in (("hit_d2d", "copy"), ("in_place", "in_place")):
        assert torch.equal(getattr(plans[name], way), view.resident)
        assert torch.equal(plans[name].stream, ~view.resident)


@given(view=views)
def test_speculate_fetches_what_most_tokens_name_and_no_more_than_it_may(view):
    mode = build_part("prefill", option_node("prefill", "speculate") | {"most_ahead": 3})
    stream = mode.ahead(view).plan.stream
    if view.guessed is None:
        assert not stream.any()
        return
    named = view.guessed * ~view.resident
    assert stream.sum() == min(3, int((named > 0).sum()))
    assert not (stream & (named == 0)).any()
    others = ~stream & ~view.resident
    if stream.any() and others.any():
        assert named[stream].min() >= named[others].max()


class Broken(PrefillMode):
    """Plans as `make(view)` says: all ahead, or all when the router has spoken."""

    def __init__(self, waits, make):
        super().__init__(PrefillMode.Config())
        self.waits, self.make = waits, make

    def ahead(self, view):
        return Ahead(Plan.of(NUM_EXPERTS) if self.waits else self.make(view), self.waits)

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


def refused(engine, mode, words, monkeypatch):
    expected = logits(engine)  # leaves residents behind as well
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime._prefill, "mode", mode)
        with pytest.raises(PolicyError, match=rf"^prefill=\w+: the plan for layer \d .*{words}"):
            logits(engine)
    assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused_and_the_engine_goes_on(engine, name, monkeypatch):
    waits, make, words = BROKEN[name]
    refused(engine, Broken(waits, lambda v: Plan.of(NUM_EXPERTS, **make(v))), words, monkeypatch)


class Twofold(PrefillMode):
    """Streams all ahead, and names what landed again when the router has spoken."""

    def ahead(self, view):
        return Ahead(Plan.of(NUM_EXPERTS, stream=everything(view)), waits=True)

    def plan(self, view):
        return Plan.of(NUM_EXPERTS, stream=everything(view))


def test_what_landed_is_not_read_again(engine, monkeypatch):
    refused(engine, Twofold(PrefillMode.Config()), "more than once", monkeypatch)


def test_what_may_not_enter_the_slots_is_not_admitted(engine, monkeypatch):
    def all_routed(view):
        return Plan.of(
            NUM_EXPERTS, in_place=view.routed & view.resident, admit=view.routed & ~view.resident
        )

    monkeypatch.setattr(engine.runtime._prefill.views, "host_layers", range(99))
    refused(engine, Broken(True, all_routed), "may not enter", monkeypatch)


def test_a_plan_of_any_kind_that_is_valid_is_run(engine, monkeypatch):
    """Copies, streams and admissions in one plan: the refusals above are not for being unusual."""
    expected = logits(engine)

    def mixed(view):
        even = torch.arange(NUM_EXPERTS) % 2 == 0
        return Plan.of(
            NUM_EXPERTS,
            copy=view.resident,
            stream=~view.resident & ~view.landed & even,
            admit=~view.resident & ~even,
        )

    monkeypatch.setattr(engine.runtime._prefill, "mode", Broken(True, mixed))
    assert torch.equal(logits(engine), expected)


class Planless(PrefillMode):
    """Waits for routers and has no plan for when they have spoken."""

    def ahead(self, view):
        return Ahead(Plan.of(NUM_EXPERTS), waits=True)


def test_a_mode_that_waits_without_a_plan_is_named(engine, monkeypatch):
    monkeypatch.setattr(engine.runtime._prefill, "mode", Planless(PrefillMode.Config()))
    with pytest.raises(PolicyError, match=r"^prefill=\w+: .*has no plan"):
        logits(engine)
