"""Parts of a trace, and the search for a policy's keys on one of them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from made_traces import made_trace, traces

from residency.policies.cache.lrfu import Lrfu
from residency.policies.errors import ConfigError
from residency.runtime.replay.pool import HITS, LOOKUPS
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.tuning import search
from residency.runtime.replay.visits import Visits
from residency.runtime.traces.parts import part_of


@examples(max_examples=30, deadline=None)
@given(traces(), st.floats(0.1, 0.9))
def test_two_parts_are_the_whole(trace, cut):
    """Each token, step and row of a prompt is in one of them, and its visits are as they were."""
    try:
        parts = part_of(trace, 0, cut), part_of(trace, cut, 1)
    except ConfigError:  # one step may hold nearly all tokens
        return
    for name in ("ids_NLK", "decode_S", "admits_S", "requests_N", "behind_S"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(joined, getattr(trace, name)), name
    whole, halves = Visits.of(trace), [Visits.of(part) for part in parts]
    for name in ("ids", "ways", "phase_S"):
        joined = np.concatenate([getattr(half, name) for half in halves])
        assert np.array_equal(joined, getattr(whole, name)), name
    assert all(part.step_offsets[0] == 0 for part in parts)


def test_the_second_part_knows_nothing_of_the_first():
    trace = made_trace(1, tokens=60)
    alone = made_trace(1, tokens=60).ids_NLK[30:]
    second = part_of(trace, 0.5, 1)
    assert np.array_equal(second.ids_NLK, alone)
    assert second.step_clocks[0] == 0


def test_a_part_without_a_step_is_refused():
    with pytest.raises(ConfigError, match="no step"):
        part_of(made_trace(1, tokens=10), 0.51, 0.55)


VALUES = {"decay": ("0.01", "0.3", "1"), "prefill_weight": ("0.1", "1")}


def lrfu(choice):
    return Lrfu(Lrfu.Config(**{key: float(value) for key, value in choice.items()}))


def test_the_search_ends_where_no_single_key_gains():
    trace = made_trace(5, tokens=300, prompts=[(0, 20), (150, 160)])
    start = {"decay": "0.1", "prefill_weight": "1"}
    found = search(trace, lrfu, start, VALUES, [4, 8])
    assert found.tried[0].choice == start
    choices = [tuple(one.choice.values()) for one in found.tried]
    assert len(set(choices)) == len(choices), "something was replayed twice"
    assert set(choices) <= {*product(*VALUES.values()), ("0.1", "1")}
    for key, options in VALUES.items():
        for value in options:
            near = next(o for o in found.tried if o.choice == {**found.best.choice, key: value})
            assert near.mean <= found.best.mean
    visits = Visits.of(trace)
    for size, rate in zip((4, 8), found.best.hit_rates, strict=True):
        counts = simulate(visits, lrfu(found.best.choice), size)
        assert rate == counts[..., HITS].sum() / counts[..., LOOKUPS].sum()
