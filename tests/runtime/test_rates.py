"""Lines fitted to steps, and the split that follows them on doctored machines."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residency.policies.decode.hybrid import Hybrid
from residency.policies.step import IdSpace
from residency.runtime.quotas import QuotaTable
from residency.runtime.rates import Rates, StepTimes, fit

US = 1e-6
LAYERS, TOP_K = 4, 10
LINK = (10 * US, 55 * US)


class Machine:
    """A link and a host whose times are lines; side by side both take `slowdown` times as long."""

    def __init__(self, link, host, slowdown=1.0, noise=0.03):
        self.link, self.host, self.slowdown, self.noise = link, host, slowdown, noise
        self.random = np.random.default_rng(0)

    def times(self, fetched, computed):
        both = (fetched > 0) & (computed > 0)
        factor = np.where(both, self.slowdown, 1.0)
        noise = 1 + self.noise * self.random.standard_normal((2, len(fetched)))
        (a, b), (c, d) = self.link, self.host
        fetch_s = (a + b * fetched) * factor * noise[0] * (fetched > 0)
        host_s = (c + d * computed) * factor * noise[1] * (computed > 0)
        return StepTimes(fetched, fetch_s, computed, host_s)

    def step_s(self, fetched, computed):
        step = self.times(fetched, computed)
        return np.maximum(step.fetch_s, step.host_s).sum()


def decode(machine, num_steps, table=None, misses=(6, 11)):
    """(seconds of hybrid, of fetching all, of computing all), over the later half; the table."""
    table = table or QuotaTable(
        Hybrid(Hybrid.Config()), IdSpace(LAYERS, 32, TOP_K), torch.device("cpu")
    )
    totals = np.zeros(3)
    for number in range(num_steps):
        m = machine.random.integers(*misses, size=LAYERS)
        fetched = np.array([int(table.of(layer, TOP_K)[m[layer]]) for layer in range(LAYERS)])
        assert ((0 <= fetched) & (fetched <= m)).all()
        step = machine.times(fetched, m - fetched)
        if number >= num_steps // 2:
            seconds = np.maximum(step.fetch_s, step.host_s).sum()
            totals += seconds, machine.step_s(m, 0 * m), machine.step_s(0 * m, m)
        table.observe(step)
    return *totals, table


@pytest.mark.parametrize("host", [8, 60, 600])
@pytest.mark.parametrize("slowdown", [1.0, 1.4, 2.5])
def test_never_much_worse_than_the_better_side(host, slowdown):
    hybrid, gpu, cpu, _ = decode(Machine(LINK, (15 * US, host * US), slowdown), 600)
    assert hybrid <= 1.02 * min(gpu, cpu)


def test_much_better_where_both_sides_are_alike():
    hybrid, gpu, cpu, _ = decode(Machine(LINK, (15 * US, 55 * US)), 200)
    assert hybrid < 0.65 * min(gpu, cpu)


def test_a_host_that_was_slow_is_used_again_once_it_is_fast():
    machine = Machine(LINK, (15 * US, 200 * US))
    *_, table = decode(machine, 100)
    machine.host = (15 * US, 30 * US)
    hybrid, gpu, _, _ = decode(machine, 6000, table)
    assert hybrid < 0.8 * gpu


def test_a_slow_host_leaves_all_to_the_link():
    *_, table = decode(Machine(LINK, (15 * US, 5000 * US)), 200)
    row = table.of(0, TOP_K)
    assert row[6:11].tolist() == [6, 7, 8, 9, 10]


@given(
    fixed=st.floats(0, 1e-3),
    each=st.floats(1e-6, 1e-3),
    nums=st.lists(st.integers(1, 10), min_size=8, max_size=8),
    late=st.integers(0, 7),
)
def test_a_line_is_right_at_the_numbers_that_occur_and_one_late_step_does_not_count(
    fixed, each, nums, late
):
    num = np.array([nums], dtype=float)
    seconds = fixed + each * num
    seconds[0, late] *= 1000
    found_fixed, found_each = fit(num, seconds)
    assert found_fixed >= 0 and found_each >= 0
    middle = np.median(num)
    if middle in nums:
        found = found_fixed + found_each * middle
        assert found == pytest.approx(fixed + each * middle, rel=0.6)


def test_equal_numbers_give_seconds_per_expert():
    (fixed,), (each,) = fit(np.full((1, 8), 4.0), np.full((1, 8), 2.0))
    assert (fixed, each) == pytest.approx((0, 0.5))


def test_sides_alone_and_beside_are_told_apart():
    rates = Rates(1)

    def step(fetched, computed):
        one = np.array([fetched]), np.array([1.0 * fetched * (1 + (computed > 0))])
        return StepTimes(*one, np.array([computed]), np.array([3.0 * computed]))

    rates.observe([step(4, 0)] * 3)
    rates.observe([step(2, 2), step(4, 0)])
    measured = rates.measured()
    assert measured.fetched.each_s.item() == pytest.approx(1)
    assert measured.fetched_beside.each_s.item() == pytest.approx(2)
    assert measured.computed_beside.each_s.item() == pytest.approx(3)
    assert measured.computed.each_s.isnan().all()
    assert measured.steps.tolist() == [[4, 0, 1]]
    assert measured.idle_s[0].tolist() == pytest.approx([0, 12 + 6 + 4, 4])
