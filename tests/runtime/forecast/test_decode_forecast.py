"""Decode steps foretold, against steps that are drawn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residency.policies.decode.cpu import Cpu
from residency.policies.decode.gpu import Gpu
from residency.policies.decode.hybrid import Hybrid
from residency.policies.step import IdSpace
from residency.runtime.forecast.constants import Constants, HostLine
from residency.runtime.forecast.decode import Unknown, decode_step

SPACE = IdSpace(3, 32, 6)
ROW = 1000
GPU, CPU, HYBRID = Gpu(Gpu.Config()), Cpu(Cpu.Config()), Hybrid(Hybrid.Config())


HOST = HostLine(2e-4, 1e-4)


def constants(fetch_s=1e-4, host=HOST, **more):
    return Constants(1e9, ROW / fetch_s, ((1, 1e-3),), 5e-3, host=host, **more)


def step(target, hit_rate, known=None, lookups=None):
    return decode_step(target, SPACE, ROW, known or constants(), hit_rate, lookups)


@given(hit_rate=st.floats(0, 1), fetch_s=st.floats(1e-6, 1e-2))
def test_fetching_takes_the_missing_bytes_over_the_gathers_rate(hit_rate, fetch_s):
    found = step(GPU, hit_rate, constants(fetch_s))
    missing = SPACE.num_layers * SPACE.top_k * (1 - hit_rate)
    assert found.seconds == pytest.approx(5e-3 + missing * fetch_s)
    assert (found.computed, found.fetched) == pytest.approx((0, SPACE.top_k * (1 - hit_rate)))


def test_the_host_computes_all_whatever_hits():
    expected = 5e-3 + SPACE.num_layers * (2e-4 + SPACE.top_k * 1e-4)
    assert step(CPU, 0.0).seconds == step(CPU, 0.7).seconds == pytest.approx(expected)


@given(hit_rate=st.floats(0.05, 0.95), host_s=st.floats(1e-5, 1e-2))
def test_a_split_is_that_of_drawn_steps(hit_rate, host_s):
    host = HostLine(0.0, host_s)
    found = step(HYBRID, hit_rate, constants(1e-4, host))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(3000, SPACE.top_k, generator=generator) >= hit_rate
    misses = drawn.sum(1)
    waits = [min(max(f * 1e-4, (m - f) * host_s) for f in range(m + 1)) for m in range(7)]
    expected = 5e-3 + SPACE.num_layers * float(torch.tensor(waits)[misses].mean())
    assert found.seconds == pytest.approx(expected, rel=0.05)


@given(hit_rate=st.floats(0, 1), fetch_s=st.floats(1e-6, 1e-2), host_s=st.floats(1e-6, 1e-2))
def test_a_split_is_no_slower_than_the_better_side(hit_rate, fetch_s, host_s):
    known = constants(fetch_s, HostLine(0.0, host_s))
    both = step(HYBRID, hit_rate, known).seconds
    assert both <= step(GPU, hit_rate, known).seconds * (1 + 1e-9)


def test_more_hits_take_less():
    for target in (GPU, HYBRID):
        times = [step(target, h).seconds for h in (0.0, 0.3, 0.6, 0.9, 1.0)]
        assert times == sorted(times, reverse=True)
        assert times[-1] == pytest.approx(5e-3)


def test_side_by_side_rates_are_those_of_a_split():
    slow = constants(gather_beside_bytes_s=ROW / 1e-3, host_beside=HostLine(0.0, 1e-3))
    assert step(HYBRID, 0.0, slow).seconds > step(HYBRID, 0.0).seconds
    assert step(GPU, 0.0, slow).seconds == step(GPU, 0.0).seconds


def test_layers_placed_on_the_host_hit_nothing():
    placed = Gpu(Gpu.Config(cpu_layers=1))
    found = step(placed, 1.0)
    assert found.seconds == pytest.approx(5e-3 + 2e-4 + SPACE.top_k * 1e-4)


def test_several_sequences_look_up_more():
    assert step(GPU, 0.5, lookups=12).seconds > step(GPU, 0.5).seconds


def test_what_was_not_measured_is_not_foretold():
    with pytest.raises(Unknown, match="experts on the host"):
        step(HYBRID, 0.5, constants(host=None))
    with pytest.raises(Unknown, match="hits always"):
        step(GPU, 0.5, Constants(1e9, 1e9, ((1, 1.0),), None))
