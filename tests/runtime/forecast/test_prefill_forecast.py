"""Prompts foretold: the floors they are made of, over every mode there is."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residency.conf import compose
from residency.conf.options import option_names
from residency.policies.prefill.always_stream import AlwaysStream
from residency.policies.prefill.auto import Auto
from residency.policies.prefill.demand import Demand
from residency.policies.prefill.in_place import InPlace
from residency.policies.step import IdSpace
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.prefill import PrefillForecast, Shape
from residency.runtime.forecast.routes import EvenRoutes

SPACE = IdSpace(4, 16, 2)
ROUTES = EvenRoutes(SPACE)
ROW = 1000
STREAM = AlwaysStream(AlwaysStream.Config())
DEMAND = Demand(Demand.Config(max_tokens=64), STREAM)
MODES = {"always_stream": STREAM, "demand": DEMAND, "in_place": InPlace(InPlace.Config())}
MODES["auto"] = Auto(Auto.Config())


def constants(link=1e6, compute=1e-3, **more):
    return Constants(link, link, ((1, compute), (1000, 10 * compute)), None, **more)


def forecast(mode, slots=16, known=None, space=SPACE, **more):
    shape = Shape(space, ROW, slots, 2)
    return PrefillForecast(mode, EvenRoutes(space), shape, known or constants(), **more)


def test_the_modes_of_this_test_are_options():
    assert set(MODES) <= set(option_names("prefill"))
    assert compose(["prefill=auto"]).policies.prefill.learns


@given(
    link=st.floats(1e3, 1e9),
    compute=st.floats(1e-6, 1.0),
    tokens=st.integers(1, 300),
    name=st.sampled_from(sorted(MODES)),
    warm=st.booleans(),
    beside=st.booleans(),
)
def test_no_prompt_is_faster_than_its_link_or_its_compute(
    link, compute, tokens, name, warm, beside
):
    known = constants(link, compute, beside=beside)
    resident = ROUTES.resident(16) if warm else None
    prompt = forecast(MODES[name], known=known).prompt(tokens, resident)
    link_s, compute_s = prompt.link_bytes / link, known.compute_s(tokens)
    assert prompt.compute_s == pytest.approx(compute_s)
    assert prompt.seconds >= max(link_s, compute_s) * (1 - 1e-9)
    group_s = 2 * ROW / link
    assert prompt.seconds <= link_s + compute_s + group_s + 1e-9
    assert prompt.link_bytes <= SPACE.num_ids * ROW + 1e-6


def test_a_stream_is_the_longer_of_both_and_its_first_group():
    prompt = forecast(STREAM).prompt(1)
    assert prompt.seconds == pytest.approx(64 * ROW / 1e6 + 2 * ROW / 1e6)
    slow = forecast(STREAM, known=constants(compute=0.5)).prompt(1)
    assert slow.seconds == pytest.approx(0.5 + 2 * ROW / 1e6)
    assert not prompt.waits


def test_waiting_adds_link_and_compute():
    prompt = forecast(DEMAND).prompt(4)
    assert prompt.waits
    assert prompt.seconds == pytest.approx(prompt.link_bytes / 1e6 + prompt.compute_s)
    expected = float(ROUTES.chances(4).sum()) * ROW
    assert prompt.link_bytes == pytest.approx(expected, abs=SPACE.num_layers * ROW)


@pytest.mark.parametrize("name", sorted(MODES))
def test_longer_prompts_take_no_less(name):
    seconds = [forecast(MODES[name]).prompt(n).seconds for n in (1, 4, 16, 64)]
    for before, after in itertools.pairwise(seconds):
        assert after >= before * 0.97  # whole experts are drawn


def test_warm_slots_save_what_they_hold():
    for name in ("in_place", "auto"):
        cold, warm = (forecast(MODES[name], 32).prompt(64, r) for r in (None, ROUTES.resident(32)))
        assert warm.link_bytes <= 0.6 * cold.link_bytes
    cold, warm = (forecast(STREAM, 32).prompt(64, r) for r in (None, ROUTES.resident(32)))
    assert warm.link_bytes == cold.link_bytes


def test_auto_is_no_slower_than_either_way():
    for tokens, compute in itertools.product((1, 4, 16, 64), (1e-4, 1e-2, 1.0)):
        known = constants(compute=compute)
        auto, *others = (
            forecast(MODES[n], known=known).prompt(tokens)
            for n in ("auto", "always_stream", "demand")
        )
        assert auto.seconds <= 1.1 * min(one.seconds for one in others) + 1e-9
        assert sum(auto.ways.values()) == SPACE.num_layers


def test_a_long_prompt_goes_in_chunks():
    mode = AlwaysStream(AlwaysStream.Config(chunk_tokens=8))
    one, two = (forecast(mode).prompt(n) for n in (8, 16))
    assert two.link_bytes == 2 * one.link_bytes
    assert two.seconds == pytest.approx(2 * one.seconds)


def test_what_a_chunk_admits_is_there_for_the_next():
    mode = Demand(Demand.Config(chunk_tokens=64, max_tokens=64), STREAM)
    prompt = forecast(mode, slots=SPACE.num_ids).prompt(128)
    assert prompt.link_bytes <= SPACE.num_ids * ROW
    unwelcome = forecast(mode, slots=SPACE.num_ids, welcome=False).prompt(128)
    assert unwelcome.link_bytes > 1.9 * SPACE.num_ids * ROW * 0.9


def test_the_forecast_leaves_the_callers_pool_alone():
    resident = ROUTES.resident(16)
    before = resident.clone()
    forecast(DEMAND).prompt(8, resident)
    assert torch.equal(resident, before)
