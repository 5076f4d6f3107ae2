"""cache.slots=auto: as many slots as memory affords beside all else, and what starts runs."""

from functools import cache
from types import SimpleNamespace

import architectures
import pytest
import torch
from command import assert_refused, residency
from conftest import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from workspace_peak import measured

from residency.conf import compose
from residency.conf.replaying import sizes_of
from residency.policies.errors import CapacityError, ConfigError
from residency.runtime.architecture import Architecture
from residency.runtime.free_memory import Room
from residency.runtime.memory import RESERVE_BYTES
from residency.runtime.planner import Planner

MIB = 1 << 20
BANKS = 24576 * 6 * 64  # of the architecture below
CHOICES = (
    ("cache=lru",),
    ("cache=lrfu", "cache.scope=per_layer"),
    ("cache=s3fifo",),
    ("cache=succession", "prefill.chunk_tokens=64"),
)


@pytest.fixture(scope="module")
def architecture():
    config = architectures.config_of(
        "qwen3_moe", num_hidden_layers=6, num_experts=64, decoder_sparse_step=1
    )
    return Architecture.from_config(config, "float32", "test")


def planner(architecture, device="cpu", batch=1):
    weights = SimpleNamespace(made_up=True, dequantised_bytes=0)
    return Planner(architecture, weights, torch.device(device), 256, batch)


@cache
def auto(*choice):
    return compose([*choice, "cache.slots=auto"]).policies


def fits(plan, room):
    return all(needed <= free for _, needed, free in plan.demands(room))


@given(
    st.sampled_from(CHOICES),
    st.sampled_from(("cpu", "cuda")),
    st.sampled_from((1, 3)),
    st.integers(0, 24 * MIB),
)
@settings(max_examples=40)
def test_the_plan_fits_and_with_more_slots_would_not(architecture, choice, device, batch, free):
    asked, space = auto(*choice), architecture.space
    room = Room(2 * BANKS, RESERVE_BYTES + free) if device == "cuda" else Room(BANKS + free)
    judge, left = planner(architecture, device, batch), room.beside_system(BANKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("residency.runtime.planner.free_room", lambda _: room)
        try:
            policies, plan = judge.fitted(asked)
        except CapacityError as error:
            assert "cache.slots=auto: not even the" in str(error)
            assert "prefill.chunk_tokens" in str(error)
            assert not fits(judge.plan(asked), left)
            return
    shares = policies.cache.num_shares(space)
    assert policies.cache.num_slots(space) == plan.num_slots
    assert plan.num_slots >= batch * space.top_k * shares
    assert fits(plan, left)
    if plan.num_slots < space.num_ids:
        more = SimpleNamespace(
            cache=asked.cache.sized(plan.num_slots + shares),
            prefill=asked.prefill,
            decode=asked.decode,
        )
        assert not fits(judge.plan(more), left)


def test_the_range_of_budgets_tries_both_ends_and_what_lies_between(architecture):
    """Otherwise the property above would be idle."""
    seen = set()
    for free in range(0, 25, 4):
        with pytest.MonkeyPatch.context() as patch:
            room = Room(BANKS + free * MIB)
            patch.setattr("residency.runtime.planner.free_room", lambda _, room=room: room)
            try:
                seen.add(planner(architecture).fitted(auto("cache=lru"))[1].num_slots)
            except CapacityError:
                seen.add(0)
    assert {0, architecture.space.num_ids} < seen


def test_what_starts_prefills_its_longest_chunk_within_the_budget(checkpoint):
    keys = ("model.context=512", "prefill.chunk_tokens=128", "cache.slots=auto")
    with tiny_engine(checkpoint, *keys) as engine:
        assert engine.runtime.plan.num_slots == 24
        assert "cache.slots=auto: 24 of 24" in engine.generate([3, 4], max_new_tokens=1).notes
        whole = engine.runtime.plan
    budget = whole.bank_bytes + (whole.device_bytes - 9 * whole.row_bytes) * 8 // 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("residency.runtime.memory.free_host_bytes", lambda: budget)
        with tiny_engine(checkpoint, *keys) as engine:
            plan = engine.runtime.plan
            assert plan.num_slots == 15
            chunk_bytes, _ = measured(engine, 128, 512)
            state = engine.policies.cache.state().values()
            taken = [engine.runtime.rows.nbytes, engine.sequence.num_bytes, chunk_bytes]
            taken += [p.nbytes for p in engine.model.parameters()]
            taken += [tensor.nbytes for tensor in state]
            assert sum(taken) <= plan.device_bytes <= budget - plan.bank_bytes
            notes = engine.generate([3, 4], max_new_tokens=1).notes
            assert "cache.slots=auto: 15 of 24" in notes


def test_other_policies_may_leave_it_to_memory_for_a_while(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=5") as engine:
        with engine.reconfigured(auto("cache=lru")):
            assert engine.runtime.plan.num_slots == 24
        assert engine.runtime.plan.num_slots == 5
        assert not any("auto" in note for note in engine.generate([3], max_new_tokens=1).notes)


DEMO = ("device=cpu", "-p", "ROMEO", "workload.max_new_tokens=1")


def test_from_the_command_line(monkeypatch):
    shown = residency("validate", "cache.slots=auto", "cache.scope=per_layer", "device=cpu")
    assert shown.exit_code == 0, shown.output
    assert residency("run", *DEMO, "cache.slots=auto").exit_code == 0
    monkeypatch.setattr("residency.runtime.memory.free_host_bytes", lambda: 30 * MIB)
    words = ("cache.slots=auto: not even the 4 slots", "left to the system", "GiB free")
    assert_refused(residency("run", *DEMO, "cache.slots=auto"), *words, "model.context")


def test_a_replay_has_no_memory_to_fill(architecture):
    """Nor has `tune`, which asks the same."""
    with pytest.raises(ConfigError, match="slots=auto: how many slots that is, only the memory of"):
        sizes_of(["25%", "auto"], architecture.space, [compose().policies.cache])
