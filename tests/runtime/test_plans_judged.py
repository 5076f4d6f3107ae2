"""Any plan at all: those that cannot be right are refused, those that can are not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from residency.policies.errors import PolicyError
from residency.policies.prefill import Ahead, LayerView, Plan, PrefillMode
from residency.runtime.prefill_plans import plan_ahead, plan_rest

E = 5
masks = st.lists(st.booleans(), min_size=E, max_size=E).map(torch.tensor)
# Where each expert is read from: sometimes from two places, often from none.
WAYS = ("in_place", "copy", "stream", "admit")
plans = st.lists(st.sets(st.sampled_from(WAYS), max_size=2), min_size=E, max_size=E)
# Likelier to be right: an expert has one way, or none.
tidy = st.lists(st.sampled_from([set(), *({way} for way in WAYS)]), min_size=E, max_size=E)


def plan_of(ways):
    return Plan(*(torch.tensor([way in own for own in ways]) for way in WAYS))


class Mode(PrefillMode):
    def __init__(self, ahead, rest=None):
        super().__init__(PrefillMode.Config())
        self.answers = ahead, rest

    def ahead(self, view):
        return self.answers[0]

    def plan(self, view):
        return self.answers[1]


def judged_ahead(ways, waits, resident):
    """As the docstrings of Plan and Ahead say it, an expert at a time."""
    for expert, own in enumerate(ways):
        if len(own) > 1 or "admit" in own:
            return False
        if own & {"in_place", "copy"} and not resident[expert]:
            return False
        if not own and not waits:
            return False
    return True


def judged_rest(ways, ahead, resident, welcome, routed, landed):
    """Each routed expert is computed from exactly one place, whatever else is copied."""
    for expert, own in enumerate(ways):
        there = ahead.plan.in_place[expert] or landed[expert]
        if len(own) > 1:
            return False
        if own & {"in_place", "copy"} and not resident[expert]:
            return False
        if "admit" in own and not welcome[expert]:
            return False
        if own and there and not (own == {"admit"} and landed[expert]):
            return False
        if routed[expert] and not own and not there:
            return False
    return True


@examples(max_examples=120)
@given(ways=plans | tidy, waits=st.booleans(), resident=masks)
def test_no_plan_ahead_passes_that_cannot_be_right(ways, waits, resident):
    view = LayerView(layer=3, num_tokens=2, resident=resident, welcome=torch.ones_like(resident))
    mode = Mode(Ahead(plan_of(ways), waits))
    if judged_ahead(ways, waits, resident):
        assert plan_ahead(mode, view) is mode.answers[0]
    else:
        with pytest.raises(PolicyError, match="the plan for layer 3 "):
            plan_ahead(mode, view)


@examples(max_examples=200)
@given(
    ways=plans | tidy,
    first=masks,
    resident=masks,
    welcome=masks,
    routed=masks,
    landed=masks,
)
def test_no_plan_behind_the_router_passes_that_cannot_be_right(
    ways, first, resident, welcome, routed, landed
):
    in_place = first & resident
    ahead = Ahead(Plan.of(E, in_place=in_place), waits=True)
    landed = landed & ~in_place & routed  # what `ahead` streamed and the chunk is routed to
    view = LayerView(layer=3, num_tokens=2, resident=resident, welcome=welcome)
    view = replace(view, routed=routed, landed=landed)
    mode = Mode(ahead, plan_of(ways))
    if judged_rest(ways, ahead, resident, welcome, routed, landed):
        assert plan_rest(mode, view, ahead) is mode.answers[1]
    else:
        with pytest.raises(PolicyError, match="the plan for layer 3 "):
            plan_rest(mode, view, ahead)


def test_both_verdicts_occur():
    """Of plans as they are drawn above, so that neither side is idle."""
    found = set()

    @examples(max_examples=60, database=None)
    @given(ways=tidy, resident=masks)
    def look(ways, resident):
        found.add(judged_ahead(ways, True, resident))

    look()
    assert found == {True, False}
