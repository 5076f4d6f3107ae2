"""What a trace shows, on traces whose figures are known beforehand."""

import numpy as np
import pytest
from made_traces import made_trace

from residency.policies.cache.lru import Lru
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.visits import Visits
from residency.runtime.traces.info import info_of
from residency.runtime.traces.trace import trace_of


def parts(*experts_of, tokens=8):
    """Requests in which every token goes to the same experts of the one layer of 8."""
    ids = np.concatenate([np.tile([[experts]], (tokens, 1, 1)) for experts in experts_of])
    requests = np.repeat(np.arange(len(experts_of)), tokens)
    return trace_of(ids, 8, requests_N=requests, about={"domains": ["a", "b", "a"]})


def test_a_trace_that_never_changes():
    info = info_of(parts([0, 1]))
    assert info.reuse == 1 and info.by_chance == 0.25
    assert info.distances == {"p10": 1, "p50": 1, "p90": 1} and info.cold == 2
    assert info.lru == {1: 0, 2: 14 / 16, 4: 14 / 16, 6: 14 / 16}
    assert info.unions == {1: 0.25, 2: 0.25, 4: 0.25, 8: 0.25}
    assert info.skew.top_share == 1 and info.skew.unused == 6
    assert info.skew.effective == pytest.approx(2)
    assert info.request_shift is None and info.domain_shift is None


def test_shifts_compare_halves_within_and_across():
    info = info_of(parts([0, 1], [2, 3], [0, 1]))
    assert (info.request_shift.parts, info.request_shift.within) == (3, 1)
    assert info.request_shift.across == pytest.approx(1 / 3)  # the first and the last are alike
    assert (info.domain_shift.parts, info.domain_shift.within) == (2, 1)
    assert info.domain_shift.across == 0


def test_the_hit_rates_told_are_an_lrus():
    trace = made_trace(3, tokens=400, layers=2, experts=8, top_k=1)
    visits = Visits.of(trace)
    for slots, rate in info_of(trace).lru.items():
        hits = simulate(visits, Lru(Lru.Config()), slots)[..., 1].sum()
        assert rate == pytest.approx(hits / visits.lookups)


def test_unions_grow_to_all_that_is_used():
    info = info_of(made_trace(4, tokens=300))
    shares = list(info.unions.values())
    assert shares == sorted(shares) and shares[0] == 0.25 and shares[-1] > 0.9
