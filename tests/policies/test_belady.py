"""Belady's rule, live refused, and against the least that any order of evictions misses."""

import itertools
from functools import lru_cache

import pytest
import torch
from command import assert_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.conf import compose
from residency.policies.cache.belady import Belady
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool
from residency.testing import CachePolicyContract


class TestBelady(CachePolicyContract):
    policy = Belady


def misses(space, num_slots, run):
    """Of a pool under Belady. run [N, L, K]."""
    policy = Belady(Belady.Config(slots=num_slots))
    pool = SlotPool(space, num_slots, policy, torch.device("cpu"))
    policy.foresee(run)
    total = 0
    for token, ids_LK in enumerate(run):
        for layer, ids in enumerate(ids_LK):
            step = Step(torch.tensor(token), layer, Phase.DECODE)
            admission = pool.admit(ids, step)
            pool.touch(admission.unique, step)
            total += int(admission.counts[2])
    return total


def least_misses(num_slots, requests):
    """Over every choice of victims, by search."""

    @lru_cache(None)
    def rest(at, residents):
        if at == len(requests):
            return 0
        need = requests[at]
        missing = need - residents
        spare = sorted(residents - need)
        num_out = max(0, len(residents | need) - num_slots)
        return len(missing) + min(
            rest(at + 1, (residents - set(out)) | need)
            for out in itertools.combinations(spare, num_out)
        )

    return rest(0, frozenset())


@given(
    num_slots=st.integers(2, 5),
    run=st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=1, max_size=9),
)
@settings(max_examples=40)
def test_no_order_of_evictions_misses_less(num_slots, run):
    """Two layers of four experts, one expert a step."""
    space = IdSpace(num_layers=2, num_experts=4, top_k=1)
    requests = [frozenset({4 * layer + e}) for experts in run for layer, e in enumerate(experts)]
    routes = torch.tensor(run)[:, :, None]
    assert misses(space, num_slots, routes) == least_misses(num_slots, requests)


def test_what_is_never_needed_again_goes_first():
    policy = Belady(Belady.Config())
    policy.allocate(IdSpace(1, 4, 2), torch.device("cpu"))
    policy.foresee(torch.tensor([[[0, 1]], [[2, 1]], [[0, -1]]]), first_token=10)
    policy.touch(torch.tensor([0, 1]), Step(torch.tensor(10), 0, Phase.DECODE))
    assert policy.keys[:2].tolist() == [-12, -11]
    policy.touch(torch.tensor([1, 2]), Step(torch.tensor(11), 0, Phase.DECODE))
    assert policy.keys[:4].argsort(stable=True)[:2].tolist() == [1, 2]


@pytest.mark.parametrize("target", ["gpu", "hybrid"])
def test_refused_live_with_the_reason(target):
    (conflict,) = compose(["device=cpu", "cache=belady", f"decode={target}"]).conflicts()
    words = "cache=belady", "only the replay of a recorded run", "mend it with cache=lru"
    assert_one_line(str(conflict), *words)
