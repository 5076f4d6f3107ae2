"""Each policy in the runtime's pool against a small simulator with sets and sorting.

The simulator states who is evicted, one expert at a time; the pool must hold the same experts after
every step.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residency.policies.cache.fifo import Fifo
from residency.policies.cache.least_stale import LeastStale
from residency.policies.cache.lfu import Lfu
from residency.policies.cache.lrfu import Lrfu
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool

SPACE = IdSpace(num_layers=2, num_experts=6, top_k=3)

# Tokens in order: the gap to the last one, and each layer's experts.
runs = st.lists(
    st.tuples(
        st.integers(1, 4),
        *[st.sets(st.integers(0, SPACE.num_experts - 1), min_size=1, max_size=3)] * 2,
    ),
    min_size=1,
    max_size=30,
)


class Simulator:
    """Evicts the resident of the lowest (rank, id) that the step does not need."""

    def __init__(self, num_slots, **params):
        self.num_slots = num_slots
        self.residents = set()
        self.now = 0
        self.begin(**params)

    def begin(self):
        pass

    def step(self, ids, token, layer):
        self.token, self.layer = token, layer
        missing = [i for i in sorted(ids) if i not in self.residents]
        free = self.num_slots - len(self.residents)
        order = sorted(self.residents - ids, key=lambda i: (self.rank(i), i))
        victims = order[: max(0, len(missing) - free)]
        self.residents -= set(victims)
        self.residents |= set(missing)
        self.now += 1
        for i in victims:
            self.left(i)
        for i in missing:
            self.came(i)
        for i in ids:
            self.used(i)

    def left(self, i):
        pass

    def came(self, i):
        pass

    def used(self, i):
        pass


class FifoSimulator(Simulator):
    def begin(self):
        self.since = {}

    def came(self, i):
        self.since[i] = self.now

    def rank(self, i):
        return self.since[i]


class LfuSimulator(Simulator):
    def begin(self, half_life):
        self.half_life, self.age = half_life, 0
        self.count, self.last = Counter(), {}

    def step(self, ids, token, layer):
        age = token // self.half_life if self.half_life else 0
        for i in self.count:
            self.count[i] //= 2 ** (age - self.age)
        self.age = age
        super().step(ids, token, layer)

    def used(self, i):
        self.count[i] += 1
        self.last[i] = self.token

    def rank(self, i):
        return self.count[i], self.last[i]


class ForgetfulLfuSimulator(LfuSimulator):
    def begin(self, decay, history):
        super().begin(half_life=0)

    def left(self, i):
        del self.count[i], self.last[i]


class LeastStaleSimulator(Simulator):
    def begin(self):
        self.last = {}

    def used(self, i):
        self.last[i] = self.token

    def rank(self, i):
        layer = i // SPACE.num_experts
        stale = 0 if layer <= self.layer else 1
        return 2 if self.last[i] == self.token else stale, -layer, self.last[i]


CASES = [
    (LeastStale, {}, LeastStaleSimulator),
    (Fifo, {}, FifoSimulator),
    (Lfu, {"half_life": 0}, LfuSimulator),
    (Lfu, {"half_life": 5}, LfuSimulator),
    (Lrfu, {"decay": 0.0, "history": "reset"}, ForgetfulLfuSimulator),
]


@pytest.mark.parametrize(("policy", "params", "simulator"), CASES)
@given(num_slots=st.integers(3, 11), run=runs)
def test_the_pool_holds_what_the_simulator_holds(policy, params, simulator, num_slots, run):
    made = policy(policy.Config(slots=num_slots, **params))
    pool = SlotPool(SPACE, num_slots, made, torch.device("cpu"))
    simulated = simulator(num_slots, **params)
    token = -1
    for gap, *layers in run:
        token += gap
        for layer, experts in enumerate(layers):
            step = Step(torch.tensor(token), layer, Phase.DECODE)
            if layer == 0:
                made.refresh(step)
            admission = pool.admit(torch.tensor(sorted(experts)), step)
            pool.touch(admission.unique, step)
            simulated.step({layer * SPACE.num_experts + e for e in experts}, token, layer)
            pool.check()
            held = {i for i in pool.id_of.tolist() if i != SPACE.sink}
            assert held == simulated.residents, (token, layer)
