"""Any course of a slot pool, under any policy: maps agree, nothing needed goes, counts come out."""

import pytest
import torch
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from residency.conf.build import build_part
from residency.conf.options import option_names, option_node
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool

SPACE = IdSpace(num_layers=2, num_experts=6, top_k=2)
CPU = torch.device("cpu")
NEEDS_MORE = {"none", "static", "belady"}  # no slots, a profile, the future
POLICIES = sorted(set(option_names("cache")) - NEEDS_MORE)
layers = st.integers(0, SPACE.num_layers - 1)
experts = st.lists(st.integers(0, SPACE.num_experts - 1), min_size=1, max_size=SPACE.top_k)


class Course(RuleBasedStateMachine):
    """What the executors do to a pool, in any order, beside a plain picture of it."""

    policy = ""

    @initialize(
        slots=st.integers(SPACE.top_k, SPACE.num_ids // 2),
        scope=st.sampled_from(["global", "per_layer"]),
        declines=st.sampled_from([None, Phase.PREFILL, Phase.DECODE]),
    )
    def begin(self, slots, scope, declines):
        shares = SPACE.num_layers if scope == "per_layer" else 1
        keys = {"slots": slots * shares, "scope": scope}
        if declines is not None:
            keys[f"admit_{declines}"] = False
        policy = build_part("cache", option_node("cache", self.policy) | keys)
        self.pool = SlotPool(SPACE, slots * shares, policy, CPU)
        self.token = 0

    def step(self, layer, phase):
        return Step(torch.tensor(self.token), layer, phase)

    def residents(self):
        return {i for i in self.pool.id_of.tolist() if i != SPACE.sink}

    @rule(layer=layers, experts=experts, phase=st.sampled_from(Phase), quota=st.integers(0, 2))
    def admit(self, layer, experts, phase, quota):
        """A layer of a step: its experts are read from where the admission says."""
        pool, step = self.pool, self.step(layer, phase)
        before, slots_before = self.residents(), pool.id_of.tolist()
        needed = {layer * SPACE.num_experts + expert for expert in experts}
        table = torch.arange(SPACE.num_experts + 1).clamp(max=quota)
        admission = pool.admit(torch.tensor(experts), step, table if quota < 2 else None)
        lookups, hits, misses, evictions, on_host = admission.counts.tolist()
        assert lookups == len(needed) and hits + misses == lookups
        assert hits == len(needed & before)
        after, entered = self.residents(), set(admission.entered.tolist()) - {SPACE.sink}
        gone = before - after
        assert needed & before <= after, "what the step needs stays"
        assert entered == after - before <= needed, "only what is needed comes"
        assert len(gone) == evictions <= len(entered)
        assert set(admission.evicted.tolist()) - {SPACE.sink} == gone
        empty = sum(slots_before[slot] == SPACE.sink for slot in pool.slots_for(layer))
        assert evictions == max(0, len(entered) - empty), "nobody goes while a slot is empty"
        if pool.may_decline(step):
            assert not entered or pool.welcomes(torch.tensor(sorted(entered)), step).all()
        assert on_host == int(admission.on_host.sum()) <= misses
        for id_, row, fetched in zip(*(t.tolist() for t in admission[:3]), strict=True):
            if id_ == SPACE.sink or row == -1:
                continue
            assert fetched == (id_ not in before)
            assert (row < pool.num_slots) == (id_ in after)
            assert row >= pool.num_slots or pool.id_of[row] == id_
        rows = [row for row in admission.rows.tolist() if row >= 0]
        assert len(set(rows)) == len(rows), "no two experts in one place"

    @rule(layer=layers, experts=experts, phase=st.sampled_from(Phase))
    def touch(self, layer, experts, phase):
        before = self.residents()
        self.pool.touch(self.pool.distinct(torch.tensor(experts), layer), self.step(layer, phase))
        assert self.residents() == before

    @rule(tokens=st.integers(1, 1000))
    def pass_time(self, tokens):
        self.token += tokens
        self.pool.refresh(self.step(0, Phase.DECODE))

    @rule()
    def empty(self):
        keys = self.pool.policy.keys.clone()
        self.pool.empty()
        assert not self.residents()
        assert self.pool.policy.follows_moves or torch.equal(self.pool.policy.keys, keys)

    @rule()
    def clear(self):
        self.pool.clear()
        self.token = 0
        assert not self.residents()

    @rule(data=st.data())
    def place(self, data):
        """As a saved state comes back: each expert where its layer may be, or nobody."""
        placed = torch.full_like(self.pool.id_of, SPACE.sink)
        for layer in range(SPACE.num_layers) if self.pool.has_shares else [None]:
            slots = self.pool.slots_for(layer or 0)
            first = (layer or 0) * SPACE.num_experts
            count = SPACE.num_experts if self.pool.has_shares else SPACE.num_ids
            ids = data.draw(st.permutations(range(first, first + count)))[: len(slots)]
            kept = data.draw(st.integers(0, len(ids)))
            placed[slots.start : slots.start + kept] = torch.tensor(ids[:kept], dtype=torch.int32)
        self.pool.place(placed)
        assert torch.equal(self.pool.id_of, placed)

    @invariant()
    def maps_are_one_anothers_inverse(self):
        if not hasattr(self, "pool"):
            return
        pool, held = self.pool, self.pool.id_of.tolist()
        taken = [i for i in held if i != SPACE.sink]
        assert len(set(taken)) == len(taken), "an expert twice"
        assert pool.slot_of[SPACE.sink] == -1
        for id_, slot in enumerate(pool.slot_of.tolist()[:-1]):
            assert (slot == -1) == (id_ not in taken)
            assert slot == -1 or held[slot] == id_
            assert slot == -1 or slot in pool.slots_for(id_ // SPACE.num_experts)
        pool.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_course_keeps_the_invariants(policy):
    case = type(f"Course_{policy}", (Course,), {"policy": policy}).TestCase
    case.settings = examples(max_examples=8, stateful_step_count=20, deadline=None)
    case().runTest()
