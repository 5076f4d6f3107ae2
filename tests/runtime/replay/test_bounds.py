"""What no policy beats, against all that could be done, and against other people's figures."""

import gzip
import json
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from made_traces import made_trace, traces

from residency.conf import compose
from residency.policies.cache.lru import Lru
from residency.runtime.replay.belady import belady, static
from residency.runtime.replay.pool import EVICTIONS, HITS, LOOKUPS, MISSES
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.stack_distances import lru_hits, stack_distances
from residency.runtime.replay.visits import Visits

DATA = Path(__file__).parents[2] / "data"
LOCALITY = DATA / "gemma-4-26b-a4b_routing-locality.json.gz"
LRU = Lru(Lru.Config())
# Not its LFU, which forgets the counts of what it evicts. Its S3FIFO takes 20 slots or more.
JUDGED = {"lru": "LRU", "fifo": "FIFO", "s3fifo": "S3FIFO"}
ONE_A_STEP = Visits.of(made_trace(7, tokens=2000, layers=1, experts=64, top_k=1))


def visits_of(visits):
    """The ids of each visit, as sets."""
    return [frozenset(map(int, part)) for part in np.split(visits.ids, visits.offsets[1:-1])]


def most_hits(wanted, slots, bypass):
    """Hits of the best of all choices, by trying them: what a pool may hold after each visit."""

    @lru_cache(None)
    def best(at, held):
        if at == len(wanted):
            return 0
        now, hits = wanted[at], len(wanted[at] & held)
        everything = held | now
        if len(everything) <= slots:
            return hits + best(at + 1, everything)
        must = frozenset() if bypass else now
        others = sorted(everything - must)
        return hits + max(
            best(at + 1, must | frozenset(kept)) for kept in combinations(others, slots - len(must))
        )

    return best(0, frozenset())


@examples(max_examples=8)
@given(st.integers(0, 1 << 16), st.integers(2, 4), st.booleans())
def test_belady_hits_as_often_as_the_best_of_all_choices(seed, slots, bypass):
    visits = Visits.of(made_trace(seed, tokens=7, experts=4))
    counts = belady(visits, slots, bypass=bypass)
    assert counts[..., HITS].sum() == most_hits(visits_of(visits), slots, bypass)


@examples(max_examples=25)
@given(traces(), st.integers(3, 12))
def test_the_bounds_bound_and_the_counts_add_up(trace, slots):
    visits = Visits.of(trace)
    forms = [
        simulate(visits, LRU, slots),
        belady(visits, slots),
        belady(visits, slots, bypass=True),
    ]
    for counts in (*forms, static(visits, slots)):
        assert counts[..., LOOKUPS].sum() == visits.lookups
        assert (counts[..., HITS] + counts[..., MISSES] == counts[..., LOOKUPS]).all()
        assert (counts[..., EVICTIONS] <= counts[..., MISSES]).all()
    if trace.admits_S.all() and trace.step_tokens.max() == 1 and not len(trace.passed_P3):
        hits = [int(counts[..., HITS].sum()) for counts in forms]
        assert hits == sorted(hits)


def test_static_keeps_the_most_wanted():
    visits = Visits.of(made_trace(0))
    counts = np.sort(np.bincount(visits.ids))[::-1]
    for slots in (1, 3, 8):
        assert static(visits, slots)[..., HITS].sum() == counts[:slots].sum()


def by_definition(ids):
    """Stack distances: distinct ids between an access and the one before it to the same id."""
    for at, own in enumerate(ids):
        before = [i for i in range(at) if ids[i] == own]
        yield len(set(ids[before[-1] + 1 : at])) if before else None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80))
def test_stack_distances_are_what_they_are_defined_as(ids):
    histogram, cold = stack_distances(np.array(ids), 6)
    expected = list(by_definition(ids))
    assert cold == expected.count(None)
    assert histogram.tolist() == [expected.count(distance) for distance in range(6)]


@examples(max_examples=25)
@given(st.integers(0, 1 << 16), st.integers(1, 9))
def test_stack_distances_give_the_hits_of_an_lru_that_sees_one_id_at_a_time(seed, slots):
    visits = Visits.of(made_trace(seed, top_k=1, tokens=120))
    histogram, _ = stack_distances(visits.ids, visits.space.num_ids)
    assert lru_hits(histogram, slots) == simulate(visits, LRU, slots)[..., HITS].sum()


def test_recorded_histograms_give_the_lru_hits_recorded_beside_them():
    """Gemma-4-26B-A4B, 30 layers at 4 sizes; the recorder's LRU protects a token's own experts."""
    layers = json.loads(gzip.decompress(LOCALITY.read_bytes()))["all_workloads"]
    assert len(layers) == 30
    for layer in layers.values():
        recorded = {int(d): n for d, n in layer["reuse_distance"]["histogram"].items()}
        histogram = np.zeros(max(recorded) + 1, dtype=np.int64)
        histogram[list(recorded)] = list(recorded.values())
        for slots, lru in layer["lru"].items():
            off = abs(int(lru_hits(histogram, int(slots))) - lru["hits"])
            assert off <= 0.003 * layer["expert_demand_count"]


def libcachesim_hits(name, ids, slots):
    """Hits that libcachesim counts, an object an id, each of size 1."""
    library = pytest.importorskip("libcachesim")
    cache = getattr(library, name)(slots)
    ahead = next_use(ids)
    hits = 0
    for clock, (own, later) in enumerate(zip(ids, ahead, strict=True)):
        request = library.Request()
        request.obj_id, request.obj_size = int(own) + 1, 1
        request.clock_time, request.next_access_vtime = clock, int(later)
        hits += bool(cache.get(request))
    return hits


def next_use(ids):
    """The next access to the same id, counted from 1 as the library does; a large one for none."""
    later, seen = [], {}
    for at in range(len(ids) - 1, -1, -1):
        later.append(seen.get(int(ids[at]), np.iinfo(np.int64).max))
        seen[int(ids[at])] = at
    return later[::-1]


@pytest.mark.parametrize("slots", [20, 24, 40])
@pytest.mark.parametrize("name", JUDGED)
def test_a_policy_hits_as_often_as_libcachesims(name, slots):
    """Traces of one expert a step, where the definitions coincide."""
    policy = compose([f"cache={name}"]).policies.cache
    hits = simulate(ONE_A_STEP, policy, slots)[..., HITS].sum()
    assert hits == libcachesim_hits(JUDGED[name], ONE_A_STEP.ids, slots) > 0


@pytest.mark.parametrize("slots", [8, 24, 40])
def test_belady_hits_as_often_as_libcachesims(slots):
    expected = libcachesim_hits("Belady", ONE_A_STEP.ids, slots)
    assert belady(ONE_A_STEP, slots)[..., HITS].sum() == expected > 0
