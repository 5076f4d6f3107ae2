"""LRU and LRFU on a recorded decode, against figures computed elsewhere.

The trace is gpt-oss-20b's (tests/data, 39,795 tokens x 24 layers x top-4 of 32): requests in order,
one global pool, hits counted before admission, the step's own experts protected, ties evict the
lowest id, history kept. LRU hits .59303 / .78457 / .90270 at 192 / 288 / 384 slots, LRFU(0.1)
.66500 / .82399 / .91620.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from residency.policies.cache.lrfu import NEVER, TOKEN_BITS, Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool

TRACE = Path(__file__).parents[1] / "data" / "gpt-oss-20b_decode.npz"
SPACE = IdSpace(num_layers=24, num_experts=32, top_k=4)
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
    ("keys", "num_slots", "expected"),
    [(lru_keys, 192, 0.59303), (lru_keys, 384, 0.90270), (lrfu_keys, 384, 0.91620)],
)
def test_hit_rate_of_the_whole_trace(ids_NLK, keys, num_slots, expected):
    hits = replay(ids_NLK, keys(), num_slots)
    assert hits / ids_NLK.size == pytest.approx(expected, abs=2e-5)


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
