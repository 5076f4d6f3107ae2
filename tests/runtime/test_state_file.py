"""Warm starts: a saved state continues as if the process had gone on, or is refused with why."""

import json
import os
import subprocess
import sys

import pytest
import torch
from command import assert_refused, residency
from conftest import tiny_engine, write_checkpoint
from safetensors.torch import load_file, save_file

from residency.conf import compose
from residency.policies.errors import ConfigError, OutputError, PolicyError
from residency.policies.step import IdSpace

SPACE = IdSpace(num_layers=3, num_experts=8, top_k=2)  # of the tiny checkpoint
PROMPTS = [list(range(3, 20)), list(range(40, 22, -1))]
FEW = ("cache.slots=6", "prefill=demand")
SHORT = ("device=cpu", "workload.max_new_tokens=6", "workload.temperature=0", "cache.slots=25%")


def run(engine, prompt):
    report = engine.generate(prompt, max_new_tokens=10, ignore_eos=True)
    return report.token_ids, report.counters


def warm(file):
    return f"cache.warm_start='{file}'"


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """The file behind one prompt under lrfu."""
    file = tmp_path_factory.mktemp("state") / "state.safetensors"
    with tiny_engine(checkpoint, *FEW) as engine:
        run(engine, PROMPTS[0])
        engine.save_state(file)
    return file


@pytest.mark.parametrize(
    "overrides",
    [
        ("cache=lru",),
        ("cache=lrfu",),
        ("cache=lrfu", "cache.history=reset"),
        ("cache=lfu", "cache.half_life=4"),
        ("cache=fifo",),
        ("cache=s3fifo",),
        ("cache=s3fifo", "cache.scope=per_layer"),
        ("cache=least_stale",),
    ],
    ids=" ".join,
)
def test_a_run_from_the_file_counts_what_the_run_before_would_have(checkpoint, tmp_path, overrides):
    file = tmp_path / "state.safetensors"
    with tiny_engine(checkpoint, *FEW, *overrides) as engine:
        cold = run(engine, PROMPTS[0])
        engine.save_state(file)
        expected = run(engine, PROMPTS[1])
        held = engine.runtime.rows[:6].clone()
    with tiny_engine(checkpoint, *FEW, *overrides, warm(file)) as engine:
        assert run(engine, PROMPTS[1]) == expected
        assert torch.equal(engine.runtime.rows[:6], held)
        assert run(engine, PROMPTS[0])[0] == cold[0]


def test_what_it_moved_is_told_apart(checkpoint, saved):
    with tiny_engine(checkpoint, *FEW, warm(saved)) as engine:
        (note,) = engine.runtime.begun_with
        assert note.startswith("warm start: 6 of 6 saved experts are in slots, ")
        assert f"{6 * engine.banks.layout.row_bytes:,} bytes" in note
        assert not any(sum(row.bytes.values()) for row in engine.runtime.counters.rows())
        assert note in engine.generate(PROMPTS[1], max_new_tokens=1).notes


@pytest.mark.parametrize("slots", [4, 9])
def test_of_more_experts_than_slots_the_best_ranked_stay(checkpoint, saved, slots):
    tensors = load_file(saved)
    held, keys = tensors["slots"].long(), tensors["policy.keys"]
    ranked = sorted(held.tolist(), key=lambda i: (int(keys[i]), i))
    few = (f"cache.slots={slots}", "prefill=demand", warm(saved))
    with tiny_engine(checkpoint, *few) as engine:
        pool = engine.runtime.pool
        resident = (pool.slot_of[: SPACE.num_ids] >= 0).nonzero().flatten().tolist()
        assert resident == sorted(ranked[-slots:])
        assert torch.equal(pool.policy.keys, keys)
        for slot, i in enumerate(pool.id_of.tolist()):
            if i != SPACE.sink:
                layer, expert = divmod(i, SPACE.num_experts)
                bank = engine.banks.layers[layer][expert]
                assert torch.equal(engine.runtime.rows[slot], bank)
        pool.check()
        run(engine, PROMPTS[1])


def test_a_layer_keeps_its_own_slots(checkpoint, tmp_path):
    file, scope = tmp_path / "state.safetensors", "cache.scope=per_layer"
    with tiny_engine(checkpoint, "cache.slots=9", scope) as engine:
        run(engine, PROMPTS[0])
        engine.save_state(file)
    with tiny_engine(checkpoint, *FEW, scope, warm(file)) as engine:
        layers = engine.runtime.pool.id_of // SPACE.num_experts
        assert layers.tolist() == [0, 0, 1, 1, 2, 2]


def test_layers_of_the_host_take_no_slots(checkpoint, saved):
    with tiny_engine(checkpoint, *FEW, "decode.cpu_layers=[1]", warm(saved)) as engine:
        assert not (engine.runtime.pool.layer_slots(1) >= 0).any()
        run(engine, PROMPTS[1])


def fault(checkpoint, file, *overrides):
    model = ("model=folder", f"model.path={checkpoint}", "device=cpu")
    (conflict,) = compose([*model, *FEW, *overrides, warm(file)]).conflicts()
    assert conflict.keys == (f"cache.warm_start={file}",)
    return conflict.reason


def test_what_was_saved_under_something_else_is_refused(checkpoint, saved, tmp_path):
    assert "by cache=lrfu, and this is lru" in fault(checkpoint, saved, "cache=lru")
    assert "with cache.decay=0.1, and this is 0.5" in fault(checkpoint, saved, "cache.decay=0.5")
    scope = fault(checkpoint, saved, "cache.scope=per_layer")
    assert "with cache.scope=global, and this is per_layer" in scope
    other = write_checkpoint(tmp_path / "other", "qwen3_moe", num_experts=6)
    words = "3 layers x 8 experts, top-2, and this has 3 layers x 6 experts"
    assert words in fault(other, saved, "prefill.groups=2")


def test_what_changes_no_tensor_s_meaning_may_differ(checkpoint, saved):
    free = ("cache.prefill_tokens=3", "cache.admit_prefill=false", "prefill=hit_d2d")
    with tiny_engine(checkpoint, *FEW, *free, warm(saved)) as engine:
        run(engine, PROMPTS[1])


def test_files_that_hold_no_state_are_refused(checkpoint, saved, tmp_path):
    assert "cannot be read" in fault(checkpoint, tmp_path / "gone")
    damaged = tmp_path / "damaged"
    damaged.write_bytes(saved.read_bytes()[:200])
    assert "cannot be read" in fault(checkpoint, damaged)
    save_file({"slots": torch.zeros(3)}, tmp_path / "other")
    assert "its format is none" in fault(checkpoint, tmp_path / "other")


def test_nothing_is_saved_of_none_or_to_where_nothing_can_be(checkpoint, tmp_path):
    none = tiny_engine(checkpoint, "cache=none", "prefill=always_stream")
    with none as engine, pytest.raises(ConfigError, match="cache=none has no slots"):
        engine.save_state(tmp_path / "state")
    with tiny_engine(checkpoint) as engine, pytest.raises(OutputError, match="cannot be written"):
        engine.save_state(tmp_path / "not" / "there")


def test_a_policy_that_takes_its_state_over_wrongly_is_stopped(checkpoint, saved, monkeypatch):
    from residency.policies.cache.lrfu import Lrfu

    def restore(self, saved):
        self.keys = saved["keys"]

    monkeypatch.setattr(Lrfu, "restore", restore)
    with pytest.raises(PolicyError, match=r"^cache=lrfu: restore puts another keys"):
        tiny_engine(checkpoint, *FEW, warm(saved))


def test_another_process_goes_on_where_one_has_ended(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    result = residency("run", "ROMEO:", *SHORT, "--save-state", first)
    assert result.exit_code == 0, result.output
    code = "from residency.cli import main; main()"
    args = ("run", "JULIET:", *SHORT, warm(first), "--save-state", str(second), "--json")
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    continued = json.loads(done.stdout)
    again = json.loads(residency("run", "JULIET:", *SHORT, warm(first), "--json").stdout)
    cold = json.loads(residency("run", "JULIET:", *SHORT, "--json").stdout)
    assert continued["counters"] == again["counters"] != cold["counters"]
    assert continued["token_ids"] == cold["token_ids"]
    assert load_file(second)["clock"] > load_file(first)["clock"]


def test_commands_that_would_make_it_void_refuse_it(tmp_path):
    refused = residency("bench", warm(tmp_path / "state"))
    assert_refused(refused, "cache.warm_start", "empties the slots", "residency run")
    refused = residency("replay", "trace=x", "cache=lru", "cache.warm_start=y")
    assert_refused(refused, "cache.warm_start=y", "begins with empty slots")
    args = ("cache=none", "prefill=always_stream", "--save-state", tmp_path / "state")
    assert_refused(residency("run", "x", "device=cpu", *args), "cache=none has no slots")
