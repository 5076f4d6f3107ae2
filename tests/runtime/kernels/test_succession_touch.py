"""The fused touch of succession equals its tensor form, bit for bit, in all of its state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.succession import Succession
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.kernels.touch import touch_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPACE = IdSpace(3, 8, 4)


class Pair:
    """The policy touched both ways."""

    def __init__(self, space, **params):
        self.space = space
        self.plain, self.fused = (Succession(Succession.Config(**params)) for _ in range(2))
        for each in (self.plain, self.fused):
            each.allocate(space, DEVICE)
        self.form = touch_of(self.fused)
        assert self.form != self.fused.touch

    def refresh(self, token):
        for each in (self.plain, self.fused):
            each.refresh(self.step(token))

    def touch(self, token, layer, experts, phase=Phase.DECODE, sinks=0):
        ids = [layer * self.space.num_experts + e for e in experts] + [self.space.sink] * sinks
        unique = torch.tensor(ids, dtype=torch.int64, device=DEVICE)
        self.plain.touch(unique, self.step(token, layer, phase))
        self.form(unique, self.step(token, layer, phase))
        self.compare()

    def step(self, token, layer=0, phase=Phase.DECODE):
        return Step(torch.tensor(token, device=DEVICE), layer, phase)

    def compare(self):
        fused = self.fused.state()
        for name, tensor in self.plain.state().items():
            assert torch.equal(tensor, fused[name]), name

    def fill(self, seed):
        """The same made-up history for both: sources, averages up to 1, sums beyond 2^24."""
        generator = torch.Generator().manual_seed(seed)
        plain = self.plain

        def drawn(tensor, low, high):
            numbers = torch.randint(low, high, tensor.shape, generator=generator)
            tensor.copy_(numbers)

        drawn(plain.sources, 0, 2)
        drawn(plain.followers, 1, (1 << 16) + 1)
        drawn(plain.faded, 1 << 24, 1 << 44)
        drawn(plain.evidence, 1 << 24, 1 << 44)
        drawn(plain.last, 0, 900)
        drawn(plain.costs, 1, 1 << 40)
        self.fused.restore(plain.state())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"memory": 2, "half_life": 1, "follow": 0.0},
        {"memory": 4096, "half_life": 128, "age": 0.0, "follow": 16},
        {"memory": 8, "age": 16, "follow": 0.3},
    ],
)
@given(
    run=st.lists(
        st.tuples(
            st.integers(1, 1500),
            st.sampled_from([Phase.DECODE, Phase.DECODE, Phase.PREFILL]),
            st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=3, max_size=3),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(deadline=None, max_examples=12)
def test_a_run_of_tokens(params, run):
    """Tokens through all layers, some of which they pass over; ids padded or not."""
    pair, token = Pair(SPACE, **params), 0
    for gap, phase, sets, sinks in run:
        token += gap
        pair.refresh(token)
        for layer, experts in enumerate(sets):
            if experts:
                pair.touch(token, layer, sorted(experts), phase, sinks)


@pytest.mark.parametrize("num_experts", [1, 5, 8, 60, 130])
def test_any_number_of_experts(num_experts):
    """Blocks of columns that are full and not; the last layer's sink lies right behind it."""
    generator = torch.Generator().manual_seed(num_experts)
    pair = Pair(IdSpace(2, num_experts, min(4, num_experts)), memory=4)
    pair.fill(num_experts)
    for token in range(1000, 1004):
        pair.refresh(token)
        for layer in range(2):
            count = 1 + int(torch.randint(min(9, num_experts), (), generator=generator))
            experts = torch.randperm(num_experts, generator=generator)[:count].tolist()
            pair.touch(token, layer, experts, sinks=token % 3)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("count", "sinks"), [(0, 0), (0, 2), (64, 0), (65, 0), (130, 70)])
def test_any_number_of_ids(count, sinks, phase):
    pair = Pair(IdSpace(2, 130, 4))
    pair.fill(count)
    for token in (1000, 1001):
        pair.refresh(token)
        pair.touch(token, 1, range(count), phase, sinks)


@pytest.mark.parametrize("shift", range(1, 13))
def test_every_memory(shift):
    """Averages of all sizes learn and sum up alike, as sources, as used, and as both."""
    pair = Pair(IdSpace(1, 20, 4), memory=1 << shift)
    pair.fill(shift)
    for token, experts in ((1000, range(12)), (1001, range(6, 15))):
        pair.refresh(token)
        pair.touch(token, 0, experts)


@pytest.mark.parametrize("phase", list(Phase))
def test_logs_of_numbers_that_fp32_has_to_round(phase):
    """Numbers around the middle of two neighbours, of odd ones and even ones."""
    pair = Pair(IdSpace(1, 60, 4), follow=0.7)
    pair.fill(1)
    step = 1 << torch.arange(1, 31)  # between fp32 neighbours at 2^24 and above
    numbers = torch.cat([(step << 24) - step // 2, (step << 23) + 3 * step // 2])
    for each in (pair.plain, pair.fused):
        each.evidence[:60] = torch.stack([numbers, numbers.flip(0) + 1], 1).to(DEVICE)
        each.faded[:60] = numbers.to(DEVICE) - (1 << 16) + 1
    pair.touch(1000, 0, range(0, 60, 2), phase)


def test_ages_that_cost_nothing_count_as_used_whoever_made_them():
    """Before the first refresh all costs are 0; between two, a second touch finds those of one."""
    pair = Pair(SPACE)
    pair.touch(1, 1, [2, 3])
    pair.refresh(2)
    pair.touch(2, 1, [0, 5])
    pair.touch(2, 1, [5, 7], sinks=1)
    assert pair.fused.sources[8:16].tolist() == [1, 0, 0, 0, 0, 1, 0, 1]


def test_ids_of_another_layer_are_kept_and_not_learned():
    pair = Pair(SPACE)
    pair.refresh(1)
    pair.touch(1, 1, [-3, 4, 9])
    assert pair.fused.last.tolist().count(1) == 3


def test_a_restored_state_is_what_the_next_touch_reads():
    """Nothing about the sources is remembered outside the state."""
    pair = Pair(SPACE)
    pair.refresh(1)
    pair.touch(1, 0, [0, 1])
    pair.fill(3)
    pair.touch(2, 0, [4, 5])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no graphs")
def test_captured():
    """One graph of three layers, replayed with other ids and tokens in place."""
    pair = Pair(IdSpace(3, 512, 10))
    ids = torch.arange(3 * 10, device=DEVICE).view(3, 10)
    token = torch.tensor(1, device=DEVICE)

    def token_through(policy, touch):
        for layer in range(3):
            step = Step(token, layer, Phase.DECODE)
            if layer == 0:
                policy.refresh(step)
            touch(ids[layer], step)

    token_through(pair.plain, pair.plain.touch)
    token_through(pair.fused, pair.form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_through(pair.fused, pair.form)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = torch.stack([torch.randperm(64, generator=generator)[:10] for _ in range(3)])
        ids.copy_(drawn + 512 * torch.arange(3)[:, None])
        token.add_(1)
        token_through(pair.plain, pair.plain.touch)
        graph.replay()
        pair.compare()
