"""The plan's other terms: what the policy keeps, keys and values, what a GPU needs beside."""

import pytest
import torch
from conftest import tiny_engine

from residency.conf import compose
from residency.conf.options import option_names
from residency.policies.errors import CapacityError
from residency.policies.step import IdSpace
from residency.runtime.free_memory import Room
from residency.runtime.memory import RESERVE_BYTES, plan_memory

SPACE = IdSpace(num_layers=3, num_experts=16, top_k=2)
NEEDS_FILE = {"static"}


@pytest.mark.parametrize("name", sorted(set(option_names("cache")) - NEEDS_FILE))
def test_a_policy_s_state_is_what_it_allocates(name):
    policy = compose([f"cache={name}"]).policies.cache
    asked = policy.state_bytes(SPACE)
    assert not hasattr(policy, "keys")  # asking takes nothing
    policy.allocate(SPACE, torch.device("cpu"))
    assert asked >= sum(tensor.nbytes for tensor in policy.state().values()) > 0
    if name == "succession":
        assert asked > 4 * SPACE.num_experts * SPACE.num_ids


def plan_of(*overrides, device="cpu"):
    config = compose(["model=qwen3_30b_a3b", *overrides])
    architecture = config.model.architecture
    return plan_memory(architecture, config.policies, 4096, device=torch.device(device))


def test_the_policy_s_state_is_part_of_the_plan():
    lru, succession = (plan_of(f"cache={name}") for name in ("lru", "succession"))
    table = 4 * 128 * 128 * 48
    assert succession.policy_bytes - lru.policy_bytes > table
    more = succession.device_bytes - lru.device_bytes
    assert more == succession.policy_bytes - lru.policy_bytes


def test_a_gpu_pins_and_keeps_some_back():
    cpu, gpu = plan_of(), plan_of(device="cuda")
    assert (cpu.pinned_bytes, cpu.graph_bytes, cpu.reserve_bytes) == (0, 0, 0)
    assert gpu.pinned_bytes == gpu.bank_bytes == cpu.bank_bytes
    assert gpu.reserve_bytes == RESERVE_BYTES and gpu.graph_bytes > 0
    parts = ("pool", "staging", "weight", "kv", "workspace", "policy", "graph", "reserve")
    assert gpu.device_bytes == sum(getattr(gpu, f"{part}_bytes") for part in parts)


def test_host_and_device_are_judged_apart():
    plan = plan_of(device="cuda")
    ((host, banks, _), (device, rest, _)) = plan.demands(Room(1, 2))
    assert (host, banks, device, rest) == ("host", plan.bank_bytes, "device", plan.device_bytes)
    ((_, all_of_it, _),) = plan_of().demands(Room(1))
    assert all_of_it == plan.bank_bytes + plan_of().device_bytes


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        (("cache.slots=all",), "cache.slots"),
        (("cache.slots=8", "prefill.groups=1", "prefill.ring=9"), "prefill.ring"),
        (("model=gpt_oss_20b", "cache.slots=8"), "prefill.chunk_tokens"),
    ],
)
def test_the_key_that_may_give_most_is_named_first(monkeypatch, overrides, first):
    monkeypatch.setattr("residency.runtime.memory.free_host_bytes", lambda: 0)
    with pytest.raises(CapacityError, match=rf"; lower {first}, "):
        plan_of(*overrides).check(torch.device("cpu"))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_keys_and_values_have_the_places_that_are_given_out(tiny_checkpoint, model_type):
    """In steps, so that a context between two of them takes the larger."""
    with tiny_engine(tiny_checkpoint(model_type), "model.context=300") as engine:
        engine.generate([3, 4, 5], max_new_tokens=2, room=300)
        taken, planned = engine.sequence.num_bytes, engine.runtime.plan.kv_bytes
        counts = 64 * len(engine.sequence.cache.layers)  # lengths, in a few numbers
        assert planned <= taken <= planned + counts
