"""succession: the contract, and its tensor form against the rule written out one id at a time."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.succession import (
    BITS,
    LOG_BITS,
    MAX_AGE,
    ONE,
    WEIGHT_BITS,
    Succession,
)
from residency.policies.step import IdSpace, Phase, Step
from residency.testing import CachePolicyContract

SPACE = IdSpace(num_layers=2, num_experts=5, top_k=2)
UNIT = 1 << (LOG_BITS + WEIGHT_BITS)


class TestSuccession(CachePolicyContract):
    policy = Succession


class TestSuccessionOfAShortMemory(CachePolicyContract):
    policy = Succession
    params = {"memory": 2, "half_life": 1, "age": 0, "follow": 16}


def made(space=SPACE, **params):
    policy = Succession(Succession.Config(**params))
    policy.allocate(space, torch.device("cpu"))
    return policy


def log2(number):
    """Piecewise linear, by Mitchell, plus fp32's bias."""
    whole = number.bit_length() - 1
    assert whole <= LOG_BITS, "no bit is rounded away"
    return ((127 + whole) << LOG_BITS) + (number << (LOG_BITS - whole)) - (1 << LOG_BITS)


class Twin:
    """The rule in plain numbers."""

    def __init__(self, policy):
        self.policy, config = policy, policy.config
        self.half_life, self.age, self.follow = config.half_life, config.age, config.follow
        ids = range(SPACE.num_ids)
        self.crf, self.following = [1 for _ in ids], [1 for _ in ids]
        self.last = [-MAX_AGE for _ in ids]
        self.merit = [0 for _ in ids]
        chance = ONE * SPACE.top_k // SPACE.num_experts
        self.average = {(p, e): chance for p in ids for e in ids}
        self.sources = [[] for _ in range(SPACE.num_layers)]

    def cost(self, age):
        return round((age / self.half_life + self.age * math.log2(1 + age)) * UNIT)

    def touch(self, used, token, layer, decodes):
        own = range(layer * SPACE.num_experts, (layer + 1) * SPACE.num_experts)
        for e in used:
            faded = round(2 ** (-min(token - self.last[e], MAX_AGE) / self.half_life) * ONE)
            self.crf[e] = (self.crf[e] * faded >> BITS) + ONE
            self.last[e] = token
        if decodes:
            shift = self.policy.config.memory.bit_length() - 1
            for p in self.sources[layer]:
                for e in own:
                    self.average[p, e] -= self.average[p, e] >> shift
                    self.average[p, e] += (e in used) * (ONE >> shift)
            for e in own:
                self.following[e] = sum(self.average[p, e] for p in used)
        self.sources[layer] = used if decodes else []
        for e in own:
            follow = round(self.follow * (1 << WEIGHT_BITS)) * log2(self.following[e])
            self.merit[e] = (log2(self.crf[e]) << WEIGHT_BITS) + follow

    def key(self, e, token, passed):
        """passed: layers that the step has done."""
        age = min(token - self.last[e], MAX_AGE)
        return self.merit[e] - self.cost(age if e // SPACE.num_experts < passed else age - 1)


steps = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.booleans(),
        st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=2, max_size=2),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(steps, st.sampled_from([(12, 1.0, 32, 0.4), (1, 0.5, 2, 0), (128, 3, 4096, 2)]))
def test_keys_are_those_of_the_rule(run, params):
    """After every touch, of passed layers and of those ahead; prompts and gaps between tokens."""
    policy = made(**dict(zip(("half_life", "follow", "memory", "age"), params, strict=True)))
    twin, token = Twin(policy), 0
    for gap, decodes, sets in run:
        token += gap
        for layer, experts in enumerate(sets):
            step = Step(torch.tensor(token), layer, Phase.DECODE if decodes else Phase.PREFILL)
            if layer == 0:
                policy.refresh(step)
            used = sorted(layer * SPACE.num_experts + e for e in experts)
            policy.touch(torch.tensor([*used, SPACE.sink]), step)
            twin.touch(used, token, layer, decodes)
            expected = [twin.key(e, token, layer + 1) for e in range(SPACE.num_ids)]
            found = policy.keys[: SPACE.num_ids].tolist()
            # The tables are rounded from decimals, the twin's from floats.
            assert np.allclose(found, expected, rtol=0, atol=2)


def decode(policy, routes):
    for token, experts in enumerate(routes, start=1):
        step = Step(torch.tensor(token), 0, Phase.DECODE)
        policy.refresh(step)
        policy.touch(torch.tensor(experts), step)


def test_what_followed_before_ranks_above_what_is_as_recent_and_as_frequent():
    """0 comes after 3 each time, 1 as often and never after 3: with 3 used now, 1 goes first."""
    space = IdSpace(num_layers=1, num_experts=5, top_k=1)
    routes = [[3], [0], [2], [1]] * 8 + [[4], [1], [0], [2], [3]]
    with_it, without = made(space), made(space, follow=0)
    decode(with_it, routes)
    decode(without, routes)
    assert with_it.keys[0] > with_it.keys[1] + UNIT
    assert abs(without.keys[0] - without.keys[1]) < 2 * UNIT


def test_experts_used_when_their_layer_last_ran_are_of_one_age():
    """Of the second layer one was used in the step before, of the first one in this step."""
    policy = made(follow=0)
    for token, layers in ((1, (0, 1)), (2, (0,))):
        for layer in layers:
            step = Step(torch.tensor(token), layer, Phase.DECODE)
            if layer == 0:
                policy.refresh(step)
            policy.touch(torch.tensor([layer * SPACE.num_experts + token - 1 + layer]), step)
    assert policy.keys[1] == policy.keys[SPACE.num_experts + 1]


def test_a_prompt_neither_reads_nor_changes_what_followed():
    policies = [made(), made()]
    policies[1].followers.random_(1, ONE)
    before = policies[1].followers.clone()
    step = Step(torch.tensor(4), 1, Phase.PREFILL)
    for policy in policies:
        policy.refresh(step)
        policy.touch(torch.tensor([5, 7, 10]), step)
    one, other = (policy.state() for policy in policies)
    assert torch.equal(policies[1].followers, before)
    for name in set(one) - Succession.decode_alone:
        assert torch.equal(one[name], other[name])
