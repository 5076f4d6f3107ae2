"""The split of hybrid, against trying every number; its caps; layers placed on the host."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from residency.policies.decode import Line, Measured
from residency.policies.decode.gpu import Gpu
from residency.policies.decode.hybrid import Hybrid, best_split

MOST = 10
seconds = st.floats(0, 1, allow_subnormal=False)
lines = st.one_of(st.tuples(seconds, seconds), st.just((float("nan"), float("nan"))))


def measured(*fixed_and_each, misses=6.0, steps=100, idle_s=0.0):
    """One layer: fetching and computing, alone and beside."""
    four = [
        Line(*(torch.tensor([value], dtype=torch.float64) for value in line))
        for line in fixed_and_each
    ]
    counts = torch.full((1, 3), steps), torch.full((1, 3), idle_s, dtype=torch.float64)
    return Measured(*four, torch.tensor([misses], dtype=torch.float64), *counts)


def cost(fixed_and_each, fetched, misses):
    """As the interface says, in plain numbers; infinite where unknown."""
    fetch, host, fetch_beside, host_beside = fixed_and_each

    def at(line, num):
        value = line[0] + line[1] * num
        return float("inf") if value != value else value

    computed = misses - fetched
    if misses == 0:
        return 0
    if computed == 0:
        return at(fetch, fetched)
    if fetched == 0:
        return at(host, computed)
    return max(at(fetch_beside, fetched), at(host_beside, computed))


@given(
    four=st.tuples(lines, lines, lines, lines),
    caps=st.tuples(st.integers(0, 10), st.integers(0, 10)),
)
@example(four=((0.0, 1e-13),) * 4, caps=(0, 10))  # however small the times are
def test_no_number_ends_sooner(four, caps):
    fetch_share, host_share = max(caps) / 10, 1 - min(caps) / 10
    least = [m - int(host_share * m + 1e-9) for m in range(MOST + 1)]
    highest = [max(low, min(m, -int(-fetch_share * m // 1))) for m, low in enumerate(least)]
    got = best_split(measured(*four), torch.tensor(least), torch.tensor(highest))[0].tolist()
    for m, (fetched, low, high) in enumerate(zip(got, least, highest, strict=True)):
        assert low <= fetched <= high
        best = min(cost(four, f, m) for f in range(low, high + 1))
        assert cost(four, fetched, m) <= best * (1 + 1e-9)


def test_all_are_fetched_while_nothing_is_known_and_where_it_makes_no_difference():
    unknown = (float("nan"), float("nan"))
    for line in (unknown, (1.0, 0.0)):
        table = Hybrid(Hybrid.Config()).quotas(measured(line, line, line, line), MOST).table_LM
        assert table[0].tolist() == list(range(MOST + 1))


def test_caps_bind_while_ways_are_tried_as_well():
    target = Hybrid(Hybrid.Config(max_fetch=0.5, max_host=0.7))
    slow, fast = (0.0, 1.0), (0.0, 0.01)
    for steps in (0, 100):
        for four in ((slow, fast, slow, fast), (fast, slow, fast, slow)):
            table = target.quotas(measured(*four, steps=steps), MOST).table_LM[0].tolist()
            for m, fetched in enumerate(table):
                assert fetched <= -(-m // 2)
                assert m - fetched <= 0.7 * m + 1e-9


def test_each_way_is_tried_first_and_again_after_long():
    line = (0.0, 1.0)
    target = Hybrid(Hybrid.Config(warmup=3))
    fresh = target.quotas(measured(line, line, line, line, steps=2), MOST)
    assert fresh.table_LM[0].tolist() == list(range(MOST + 1)) and fresh.steps == 1
    followed = target.quotas(measured(line, line, line, line, steps=3), MOST)
    assert followed.table_LM[0, 8] == 4 and followed.steps > 1
    again = target.quotas(measured(line, line, line, line, steps=3, idle_s=1e9), MOST)
    assert again.table_LM[0].tolist() == list(range(MOST + 1))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (dict(max_fetch=0.0), "max_fetch=0.0"),
        (dict(max_host=1.5), "max_host=1.5"),
        (dict(max_fetch=0.4, max_host=0.4), "max_fetch=0.4 with decode.max_host=0.4"),
        (dict(warmup=0), "warmup=0"),
        (dict(cpu_layers=[1, 1]), "cpu_layers=[1,1]"),
        (dict(cpu_layers=-1), "cpu_layers=-1"),
        (dict(cpu_layers=1.5), "cpu_layers=1.5"),
        (dict(cpu_layers="all"), "cpu_layers=all"),
        (dict(cpu_layers=True), "cpu_layers=True"),
    ],
)
def test_values_that_cannot_work_are_named(config, named):
    (fault,) = Hybrid(Hybrid.Config(**config)).faults()
    assert named in str(fault)


@pytest.mark.parametrize(
    ("asked", "layers"),
    [(0, []), (2, [0, 1]), (0.25, [0, 1]), (0.1, [0]), ([5, 0], [0, 5]), ([], []), (0.0, [])],
)
def test_layers_as_list_count_or_fraction(asked, layers):
    target = Gpu(Gpu.Config(cpu_layers=asked))
    assert not list(target.faults()) and not list(target.layer_faults(8))
    assert sorted(target.host_layers(8)) == layers
    assert target.computes_on_host(8) is bool(layers)


@pytest.mark.parametrize("asked", [9, [8], [3, 11], 8, 0.99])
def test_layers_out_of_range_and_all_of_them_are_refused(asked):
    target = Gpu(Gpu.Config(cpu_layers=asked))
    assert not list(target.faults())
    (fault,) = target.layer_faults(8)
    assert "cpu_layers" in str(fault) and "8 MoE layers" in str(fault)
