"""S3-FIFO's closed form against the paper's queues and loops, one expert a step."""

import random
from collections import deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.s3fifo import MAIN, MAX_USES, SMALL, S3Fifo
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool
from residency.testing import CachePolicyContract


class TestS3Fifo(CachePolicyContract):
    policy = S3Fifo


class TestS3FifoOfLayers(CachePolicyContract):
    policy = S3Fifo
    params = {"scope": "per_layer", "slots": 12}


class Queues:
    """The rule as the paper and its own simulator have it, with queues and loops."""

    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.small, self.main, self.ghosts = deque(), deque(), deque()
        self.small_size = max(1, int(num_slots * 0.1))
        self.num_ghosts = max(1, int(num_slots * 0.9))
        self.uses = {}
        self.was_full = False

    def request(self, i):
        if i in self.uses:
            self.uses[i] = min(self.uses[i] + 1, MAX_USES)
            return
        known = i in self.ghosts
        if known:
            self.ghosts.remove(i)
        while len(self.uses) >= self.num_slots:
            self.was_full = True
            if len(self.main) > self.num_slots - self.small_size or not self.small:
                self.shrink_main()
            else:
                self.shrink_small()
        full = len(self.small) >= self.small_size and not self.was_full
        (self.main if known or full else self.small).append(i)
        self.uses[i] = 0

    def shrink_small(self):
        while self.small:
            i = self.small.popleft()
            if self.uses[i] < 2:
                del self.uses[i]
                self.ghosts.append(i)
                if len(self.ghosts) > self.num_ghosts:
                    self.ghosts.popleft()
                return
            self.uses[i] = 0
            self.main.append(i)

    def shrink_main(self):
        while True:
            i = self.main.popleft()
            if self.uses[i] == 0:
                del self.uses[i]
                return
            self.uses[i] -= 1
            self.main.append(i)


def pool_of(space, num_slots, **params):
    policy = S3Fifo(S3Fifo.Config(slots=num_slots, **params))
    return SlotPool(space, num_slots, policy, torch.device("cpu"))


def take(pool, experts, token, layer=0):
    step = Step(torch.tensor(token), layer, Phase.DECODE)
    pool.touch(pool.admit(torch.tensor(experts), step).unique, step)


def queue(policy, which):
    """Ids of a queue, the oldest first."""
    ids = (policy.queues[: policy.space.num_ids] == which).nonzero().flatten()
    return ids[policy.places[ids].argsort()].tolist()


def ghosts(policy):
    ids = policy.ghosts[: policy.space.num_ids].nonzero().flatten()
    return ids[policy.ghosts[ids].argsort()].tolist()


def requests(seed, count, num_ids):
    """Some experts far more often than others, and which they are drifts."""
    drawn = random.Random(seed)
    for token in range(count):
        often = int(drawn.paretovariate(0.6)) - 1
        yield (drawn.choice([often, drawn.randrange(num_ids)]) + token // 100) % num_ids


@given(seed=st.integers(0, 10_000), num_slots=st.integers(2, 30))
@settings(max_examples=12)
def test_every_queue_is_the_papers_after_every_request(seed, num_slots):
    space = IdSpace(1, 40, 1)
    pool, queues = pool_of(space, num_slots), Queues(num_slots)
    policy = pool.policy
    for token, i in enumerate(requests(seed, 300, space.num_ids)):
        take(pool, [i], token)
        queues.request(i)
        assert queue(policy, SMALL) == list(queues.small), token
        assert queue(policy, MAIN) == list(queues.main), token
        assert ghosts(policy) == list(queues.ghosts), token
        assert {i: int(policy.uses[i]) for i in queues.uses} == queues.uses


@given(seed=st.integers(0, 10_000), num_slots=st.integers(4, 20))
@settings(max_examples=12)
def test_the_queues_hold_what_the_pool_holds(seed, num_slots):
    """Several experts a step, some of them hits that must stay."""
    space, drawn = IdSpace(2, 12, 4), random.Random(seed)
    pool = pool_of(space, num_slots)
    for token in range(60):
        for layer in range(2):
            experts = {min(11, int(drawn.paretovariate(0.5))) for _ in range(4)}
            take(pool, sorted(experts), token, layer)
            held = sorted(i for i in pool.id_of.tolist() if i != space.sink)
            queued = queue(pool.policy, SMALL), queue(pool.policy, MAIN)
            assert sorted([*queued[0], *queued[1]]) == held
            assert all(len(set(pool.policy.places[q].tolist())) == len(q) for q in queued)
            assert pool.policy.uses[held].min() >= 0
    pool.empty()
    assert queue(pool.policy, SMALL) == queue(pool.policy, MAIN) == []


def test_layers_with_slots_of_their_own_are_pools_of_their_own():
    both = pool_of(IdSpace(2, 40, 1), 40, scope="per_layer")
    alone = [pool_of(IdSpace(1, 40, 1), 20) for _ in range(2)]
    streams = zip(*(requests(layer, 300, 40) for layer in range(2)), strict=True)
    for token, experts in enumerate(streams):
        for layer, i in enumerate(experts):
            take(both, [i], token, layer)
            take(alone[layer], [i], token)
    for layer, pool in enumerate(alone):
        own = both.id_of[layer * 20 : layer * 20 + 20] - layer * 40
        assert torch.equal(own, pool.id_of)
