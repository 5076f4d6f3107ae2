"""Expected routes against draws of them, and the laws that they must keep."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residency.policies.cache.lru import Lru
from residency.policies.step import IdSpace
from residency.runtime.forecast.prefill import drawn
from residency.runtime.forecast.routes import EvenRoutes, TableRoutes
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.visits import Visits
from residency.runtime.route_tables import even
from residency.runtime.traces.trace import Trace

SPACE = IdSpace(4, 16, 2)


@given(
    experts=st.integers(2, 64),
    share=st.floats(0.05, 1),
    tokens=st.integers(1, 40),
)
def test_even_unions_are_those_of_many_draws(experts, share, tokens):
    space = IdSpace(1, experts, max(1, round(share * experts)))
    generator = torch.Generator().manual_seed(0)
    picks = torch.rand(400, tokens, experts, generator=generator).topk(space.top_k).indices
    seen = torch.zeros(400, experts).scatter_(1, picks.flatten(1), 1.0).sum(1)
    expected = float(EvenRoutes(space).chances(tokens).sum())
    error = 5 * float(seen.std()) / 20 + 0.02  # and what 400 draws may never show
    assert abs(float(seen.mean()) - expected) <= error


@given(tokens=st.integers(1, 500))
def test_a_table_of_even_routes_is_even(tokens):
    table = TableRoutes(SPACE, even(SPACE, 0, 2048).table_NLK, "")
    found, expected = (float(r.chances(tokens).sum()) for r in (table, EvenRoutes(SPACE)))
    assert found == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("make", [EvenRoutes, lambda s: TableRoutes(s, even(s, 0).table_NLK, "")])
def test_longer_chunks_need_more_and_never_more_than_there_are(make):
    routes, before = make(SPACE), 0.0
    for tokens in (1, 2, 5, 20, 100, 1000):
        chances = routes.chances(tokens)
        assert chances.shape == (4, 16) and chances.dtype is torch.float64
        assert ((0 <= chances) & (chances <= 1)).all()
        assert float(chances.sum()) >= before - 1e-9
        before = float(chances.sum())
    assert float(make(SPACE).chances(1).sum()) == pytest.approx(SPACE.num_layers * SPACE.top_k)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 100))
def test_draws_are_as_many_as_are_expected(chances, turn):
    chances = torch.tensor(chances, dtype=torch.float64)
    number = int(drawn(chances, turn).sum())
    assert abs(number - float(chances.sum())) <= 1 + 1e-6
    assert not drawn(torch.zeros(5).double(), turn).any()
    assert drawn(torch.ones(5).double(), turn).all()


def trace_of(table_NLK):
    ids = table_NLK.numpy().astype("uint8")
    steps = len(ids)
    return Trace(
        SPACE,
        ids,
        np.arange(steps + 1),
        np.ones(steps, dtype=bool),
        np.ones(steps, dtype=bool),
        np.zeros(steps, dtype=np.int32),
        np.zeros(steps, dtype=np.int64),
        np.zeros((0, 3), dtype=np.int32),
        np.zeros((0, 3), dtype=np.int32),
    )


@pytest.mark.parametrize("slots", [20, 32, 48])
def test_the_hit_rate_of_even_routes_is_that_of_the_replayed_pool(slots):
    table = even(SPACE, 1, 600).table_NLK
    counts = simulate(Visits.of(trace_of(table)), Lru(Lru.Config(slots=slots)), slots)
    replayed = counts[..., 1].sum() / counts[..., 0].sum()
    assert EvenRoutes(SPACE).hit_rate(slots) == pytest.approx(replayed, abs=0.035)
    assert TableRoutes(SPACE, table, "").hit_rate(slots) == pytest.approx(replayed, abs=0.035)


@pytest.mark.parametrize("make", [EvenRoutes, lambda s: TableRoutes(s, even(s, 0).table_NLK, "")])
def test_more_slots_hit_more_and_hold_what_they_can(make):
    routes, before = make(SPACE), 0.0
    assert routes.hit_rate(SPACE.num_layers * SPACE.top_k - 1) < 0.1  # below a token's cycle
    for slots in (12, 24, 40, 64):
        assert routes.hit_rate(slots) >= before
        before = routes.hit_rate(slots)
        assert int(routes.resident(slots).sum()) == slots
    assert before > 0.95
