"""LRU, LRFU and Belady's bound on a recorded decode, against figures computed elsewhere.

The trace is gpt-oss-20b's (tests/data, 39,795 tokens x 24 layers x top-4 of 32): requests in order,
one global pool, hits counted before admission, the step's own experts protected, ties evict the
lowest id, history kept. LRU hits .59303 / .78457 / .90270 at 192 / 288 / 384 slots, LRFU(0.1)
.66500 / .82399 / .91620, Belady .81701 / .91439 / .96384, and .8185 / .9149 / .9640 where a miss
may bypass the pool.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from residency.policies.cache.lrfu import NEVER, TOKEN_BITS, Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.cache.succession import Succession
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.replay.curves import Candidate, draw_curves
from residency.runtime.replay.jit import COMPILES
from residency.runtime.replay.pool import HITS
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.visits import Visits
from residency.runtime.slots import SlotPool
from residency.runtime.traces import read
from residency.runtime.traces.parts import part_of
from residency.runtime.traces.trace import trace_of

TRACE = Path(__file__).parents[1] / "data" / "gpt-oss-20b_decode.npz"
SPACE = IdSpace(num_layers=24, num_experts=32, top_k=4)
SIZES = (192, 288, 384)
NONE = np.iinfo(np.int64).max


@pytest.fixture(scope="module")
def ids_NLK():
    """Global ids."""
    experts = np.load(TRACE)["expert_ids"].astype(np.int64)
    return experts + np.arange(SPACE.num_layers)[None, :, None] * SPACE.num_experts


def lru_keys():
    return lambda i, token, layer: token * SPACE.num_layers + layer


def lrfu_keys():
    """The scalar form, one id at a time."""
    policy = Lrfu(Lrfu.Config(decay=0.1))
    policy.allocate(SPACE, torch.device("cpu"))
    scores = [NEVER] * SPACE.num_ids

    def key(i, token, layer):
        scores[i] = policy.advance(scores[i], token)
        return (scores[i] << TOKEN_BITS) | token

    return key


def replay(ids_NLK, key_of, num_slots):
    """Hits of a pool without slots: the keys of what is resident, NONE elsewhere."""
    resident = np.full(SPACE.num_ids, NONE)
    free, hits = num_slots, 0
    for token, ids_LK in enumerate(ids_NLK):
        for layer, ids in enumerate(ids_LK.tolist()):
            missing = [i for i in ids if resident[i] == NONE]
            hits += len(ids) - len(missing)
            resident[ids] = NONE  # protected
            for _ in missing:
                if free:
                    free -= 1
                else:
                    resident[resident.argmin()] = NONE
            for i in ids:
                resident[i] = key_of(i, token, layer)
    return hits


@pytest.mark.parametrize(
    ("policy", "keys"), [(Lru(Lru.Config()), lru_keys), (Lrfu(Lrfu.Config()), lrfu_keys)]
)
@pytest.mark.parametrize("num_slots", SIZES)
def test_replay_hits_as_often_as_a_plain_loop(ids_NLK, policy, keys, num_slots):
    """Over the first tokens, by the scalar form of the keys."""
    first = ids_NLK[:2000]
    experts = first - np.arange(SPACE.num_layers)[None, :, None] * SPACE.num_experts
    counts = simulate(Visits.of(trace_of(experts, SPACE.num_experts)), policy, num_slots)
    assert counts[..., HITS].sum() == replay(first, keys(), num_slots)


FIGURES = {
    "lru": (0.59303, 0.78457, 0.90270),
    "lrfu": (0.66500, 0.82399, 0.91620),
    "belady": (0.81701, 0.91439, 0.96384),
    "belady with bypass": (0.8185, 0.9149, 0.9640),
}


@pytest.fixture(scope="module")
def curves():
    """All of them by replay, in loops that are compiled."""
    if not COMPILES:
        pytest.skip("numba is not installed")
    candidates = [Candidate("lru", Lru(Lru.Config())), Candidate("lrfu", Lrfu(Lrfu.Config()))]
    drawn = draw_curves(read(TRACE), candidates, SIZES)
    return {curve.name: curve for curve in (*drawn.policies, *drawn.bounds)}


@pytest.mark.parametrize("name", FIGURES)
def test_replay_of_the_whole_trace_has_the_reference_figures(curves, name):
    rates = [1 - point.miss_ratio for point in curves[name].points]
    assert rates == pytest.approx(FIGURES[name], abs=5e-5 if "bypass" in name else 2e-5)


@pytest.mark.skipif(not COMPILES, reason="numba is not installed")
def test_succession_hits_more_often_than_lrfu_where_it_was_not_fitted():
    """Its defaults are fitted to the first half; this is the second."""
    visits = Visits.of(part_of(read(TRACE), 0.5, 1))
    policies = {
        "succession": Succession(Succession.Config()),
        **{f"lrfu {decay}": Lrfu(Lrfu.Config(decay=decay)) for decay in (0.08, 0.1, 0.125)},
    }
    rates = {
        name: [simulate(visits, policy, n)[..., HITS].sum() / visits.lookups for n in (192, 384)]
        for name, policy in policies.items()
    }
    assert rates["succession"] == pytest.approx([0.70039, 0.92064], abs=2e-5)
    for few, many in (rates[name] for name in rates if name != "succession"):
        assert few < 0.665 and many < 0.912


@pytest.mark.parametrize(
    ("policy", "keys"), [(Lru(Lru.Config()), lru_keys), (Lrfu(Lrfu.Config()), lrfu_keys)]
)
def test_the_runtimes_pool_hits_as_often(ids_NLK, policy, keys):
    """Slots, maps and the tensor form, over the first tokens."""
    first = ids_NLK[:150]
    pool = SlotPool(SPACE, 192, policy, torch.device("cpu"))
    hits = 0
    for token, ids_LK in enumerate(first):
        for layer, ids in enumerate(ids_LK):
            step = Step(torch.tensor(token), layer, Phase.DECODE)
            admission = pool.admit(torch.from_numpy(ids) - layer * SPACE.num_experts, step)
            pool.touch(admission.unique, step)
            hits += int(admission.counts[1])
    assert hits == replay(first, keys(), 192)
