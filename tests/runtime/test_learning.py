"""What prefill learns: what a layer lacked, and what was chosen, as the report has it."""

import math

import torch

from residency.policies.prefill import Ahead, Choice, Costs, LayerView, Plan
from residency.policies.prefill.auto import Auto
from residency.policies.step import IdSpace
from residency.runtime.learning import Learning

SPACE = IdSpace(num_layers=4, num_experts=8, top_k=2)
NOBODY = torch.zeros(8, dtype=torch.bool)
IDS = torch.tensor([[0, 1], [1, 2]])


def learning(**costs):
    told = Learning(SPACE, Auto(Auto.Config()), assumed=Costs(**costs))
    told.begin(len(IDS))
    return told


def view(**more):
    return LayerView(0, len(IDS), NOBODY, ~NOBODY, num_slots=99, **more)


def test_what_a_layer_lacked_is_told_by_length():
    told = learning(expert_s=1.0, idle_s=1.0)
    assert told.told(view(), alone=False).lacked == math.inf
    told.routed(0, IDS, 3, 3)
    assert told.told(view(), alone=False).lacked == 3.0
    for _ in range(30):
        told.routed(1, IDS, 3, 1)
    assert 1.0 <= told.told(view(), alone=False).lacked < 1.1
    longer = LayerView(0, 64, NOBODY, ~NOBODY)
    assert told.told(longer, alone=False).lacked == math.inf


def test_chances_are_worked_out_only_where_they_are_wanted():
    told = learning(expert_s=1.0, idle_s=1.0, host_s=50.0)
    assert told.told(view(), alone=False).chances is not None  # nothing is known yet
    told.routed(0, IDS, 3, 3)
    assert told.told(view(), alone=False).chances is None  # the host takes longer
    seen = told.told(view(), alone=True)  # whose cycle is its own chances' sum
    assert seen.cycle == float(seen.chances.sum())


def test_choices_are_means_over_the_layers_that_weighed_a_way():
    told = learning(expert_s=1.0, idle_s=1.0)
    nothing = Plan.of(8)
    for expected in ({"wait": 1.0}, {"wait": 3.0, "stream": 8.0}, {}):
        told.chose(Ahead(nothing, True, Choice("wait", expected)))
    (chosen,) = told.take_choices()
    assert (chosen.choice, chosen.layers, chosen.waits) == ("wait", 3, True)
    assert chosen.expected_s == {"stream": 8.0, "wait": 2.0}
    assert told.take_choices() == []
