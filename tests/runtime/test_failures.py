"""Invariant 7: a failure gives one clear line, exit status 2 or 130, and nothing half done."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from command import assert_one_line, assert_refused, residency
from conftest import tiny_engine
from safetensors.torch import load_file, save_file

from residency.policies.errors import ResidencyError
from residency.runtime.checkpoint import INDEX_NAME
from residency.runtime.models.demo import Demo
from residency.runtime.results import RESULT_NAME

DEMO = ("device=cpu", "workload.max_new_tokens=3")
PROMPT = list(range(3, 20))


def run_folder(folder, *args):
    """`residency run` over a tiny checkpoint."""
    return residency("run", "model=folder", f"model.path='{folder}'", "device=cpu", *args)


# Damaged checkpoints. Each damage changes the folder and returns the words of the message.


def weight_map(folder):
    return json.loads((folder / INDEX_NAME).read_text())["weight_map"]


def write_index(folder, entries):
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": entries}))


def key_of(folder, part):
    """The first tensor with `part` in its name, and its shard."""
    key = next(key for key in sorted(weight_map(folder)) if part in key)
    return key, folder / weight_map(folder)[key]


def change(file, edit):
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def missing_shard(folder):
    _, file = key_of(folder, "experts")
    file.unlink()
    return file, "this shard is missing"


def truncated_shard(folder):
    _, file = key_of(folder, "experts")
    os.truncate(file, file.stat().st_size // 2)
    return file, "damaged or cut short"


def empty_shard(folder):
    _, file = key_of(folder, "experts")
    file.write_bytes(b"")
    return file, "damaged or cut short"


def misshapen(folder, part):
    key, file = key_of(folder, part)
    change(file, lambda tensors: tensors.update({key: tensors[key][:-1].clone()}))
    return file, key, "has shape", "the config makes it"


def misshapen_expert(folder):
    return misshapen(folder, ".experts.3.")


def misshapen_norm(folder):
    return misshapen(folder, "input_layernorm")


def dropped(folder, part):
    """A tensor that neither shard nor index has."""
    key, file = key_of(folder, part)
    entries = weight_map(folder)
    del entries[key]
    write_index(folder, entries)
    change(file, lambda tensors: tensors.pop(key))
    return key


def missing_expert(folder):
    return folder, "lacks", "expert 3", dropped(folder, ".experts.3.")


def missing_norm(folder):
    return folder, dropped(folder, "input_layernorm"), "is missing"


def duplicate(folder):
    key, file = key_of(folder, "input_layernorm")
    other = next(f for f in sorted(folder.glob("*.safetensors")) if f != file)
    change(other, lambda tensors: tensors.update({key: torch.zeros(64)}))
    return key, "a second time"


def index_of_absent(folder):
    _, file = key_of(folder, "experts")
    write_index(folder, weight_map(folder) | {"made.up": file.name})
    return file, "made.up", "is missing", INDEX_NAME


def index_no_json(folder):
    (folder / INDEX_NAME).write_text("{")
    return folder / INDEX_NAME, "not a safetensors index"


def index_is_a_list(folder):
    write_index(folder, ["model.safetensors"])
    return folder / INDEX_NAME, "not a safetensors index"


def index_of_numbers(folder):
    write_index(folder, {"model.norm.weight": 5})
    return folder / "5", "this shard is missing"


def index_leads_out(folder):
    write_index(folder, weight_map(folder) | {"made.up": "../other.safetensors"})
    return folder / INDEX_NAME, "leads out of the folder"


def no_weights(folder):
    for file in [*folder.glob("*.safetensors"), folder / INDEX_NAME]:
        file.unlink()
    return folder, "neither model.safetensors nor"


def no_config(folder):
    (folder / "config.json").unlink()
    return folder, "no config.json"


def config_no_json(folder):
    (folder / "config.json").write_text("{")
    return folder / "config.json", "cannot be read"


def config_no_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    return folder / "config.json", "cannot be read"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def unknown_model_type(folder):
    edit_config(folder, model_type="nobody_knows", architectures=["NobodyKnows"])
    return folder / "config.json", "nobody_knows"


def no_experts(folder):
    edit_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    return folder / "config.json", "llama has no experts"


def more_experts_than_tensors(folder):
    edit_config(folder, num_local_experts=9)
    return folder, "lacks", "experts.8.gate_proj.weight"


def fewer_experts_than_tensors(folder):
    edit_config(folder, num_local_experts=7)
    return folder, "experts.7.", "above the config's 7"


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder, "the tokenizer cannot be read"


def no_tokenizer(folder):
    return folder, "no tokenizer"


DAMAGES = [
    *(missing_shard, truncated_shard, empty_shard, misshapen_expert, misshapen_norm),
    *(missing_expert, missing_norm, duplicate, index_of_absent, index_no_json, index_is_a_list),
    *(index_of_numbers, index_leads_out, no_weights, no_config, config_no_json, config_no_text),
    *(unknown_model_type, no_experts, more_experts_than_tensors, fewer_experts_than_tensors),
    *(broken_tokenizer, no_tokenizer),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_by_name(sharded, damage):
    words = damage(sharded)
    assert_refused(run_folder(sharded, "hello", "prefill.groups=2"), *words)


def test_the_undamaged_checkpoint_is_not_refused(sharded):
    with tiny_engine(sharded) as engine:
        assert len(engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True).token_ids) == 2


# Requests that cannot be served.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", ""), ("prompt is empty",)),
        (("workload.prompt=''",), ("prompt is empty",)),
        (
            ("model.context=7", "-p", "one two three four five"),
            ("context of 7", "max_new_tokens=3"),
        ),
        (("cache.slots=257",), ("cache.slots=257", "256 experts", "cache.slots=all")),
        (("cache.slots=3",), ("cache.slots=3", "needs 4", "cache.slots=4")),
        (("-f", "/no/such/file"), ("--prompt-file /no/such/file", "No such file")),
        (("-f", "/"), ("--prompt-file /", "directory")),
    ],
)
def test_a_request_that_cannot_be_served(args, words):
    assert_refused(residency("run", *DEMO, *args), *words)


def test_a_prompt_file_that_is_no_text(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff\xfe\x00")
    assert_refused(residency("run", *DEMO, "-f", file), file, "cannot be read", "utf-8")


def test_memory_that_does_not_suffice(monkeypatch):
    monkeypatch.setattr("residency.runtime.memory.free_host_bytes", lambda: 1 << 20)
    result = residency("run", *DEMO)
    assert_refused(result, "host memory", "0.00 GiB free", "banks", "cache.slots")


# Results: whole or not at all.


def files_in(folder):
    return {file.name for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("below", [".", "deeper"])
def test_out_with_a_file_in_the_way(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / below if below != "." else tmp_path / "file"
    assert_refused(residency("run", *DEMO, "--out", out), "--out", out, "cannot be written")
    assert (tmp_path / "file").read_text() == "mine"


def test_out_that_has_a_result_is_left_alone_without_force(tmp_path):
    (tmp_path / RESULT_NAME).write_text("mine")
    assert_refused(residency("run", *DEMO, "--out", tmp_path), RESULT_NAME, "--force")
    assert (tmp_path / RESULT_NAME).read_text() == "mine"
    assert residency("run", *DEMO, "--out", tmp_path, "--force").exit_code == 0
    assert json.loads((tmp_path / RESULT_NAME).read_text())["version"] == 1


def disk_full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("nth", [1, 2])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, nth):
    (tmp_path / RESULT_NAME).write_text("an older run's")
    calls = iter(range(1, 9))
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: disk_full(fd) if next(calls) == nth else real(fd))
    result = residency("run", *DEMO, "--out", tmp_path, "--force")
    assert_refused(result, f"--out {tmp_path}", "No space left on device")
    assert files_in(tmp_path) == {RESULT_NAME}
    assert (tmp_path / RESULT_NAME).read_text() == "an older run's"


def test_a_run_that_fails_writes_nothing(tmp_path):
    out = tmp_path / "out"
    assert_refused(residency("run", *DEMO, "-p", "", "--out", out), "prompt is empty")
    assert files_in(out) == set()


# Interrupts.

STAGES = {"prefill": "prefill.PrefillExecutor.layer", "decode": "decode.DecodeExecutor.layer"}


def interrupt_at(monkeypatch, stage, nth):
    """ctrl-C in the nth layer of that stage."""
    owner = f"residency.runtime.{STAGES[stage]}"
    module, cls, name = owner.rsplit(".", 2)
    original = getattr(getattr(sys.modules[module], cls), name)
    calls = iter(range(1, 1 << 20))

    def layer(*args):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(owner, layer)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_is_one_line_and_writes_nothing(tmp_path, monkeypatch, stage):
    interrupt_at(monkeypatch, stage, 3)
    result = residency("run", *DEMO, "--out", tmp_path)
    assert result.exit_code == 130
    assert_one_line(result.stderr, "interrupted")
    assert files_in(tmp_path) == set()


def logits(engine):
    seen = []
    engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["always_stream", "hit_d2d", "demand"])
def test_after_an_interrupt_the_engine_generates_the_same(checkpoint, mode, stage, nth):
    overrides = (f"prefill={mode}", "cache.slots=5", "prefill.chunk_tokens=9", "prefill.ring=2")
    with tiny_engine(checkpoint, *overrides) as engine:
        expected = logits(engine)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, stage, nth)
            with pytest.raises(KeyboardInterrupt):
                logits(engine)
        assert torch.equal(logits(engine), expected)
        engine.runtime.check()


def test_a_real_interrupt_ends_the_process(tmp_path):
    command = "from residency.cli import main; main()"
    args = ("run", "device=cpu", "workload.max_new_tokens=9999", "workload.ignore_eos=true")
    with subprocess.Popen(
        [sys.executable, "-c", command, *args, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hears_interrupts,
    ) as process:
        try:
            assert process.stdout.read(len("ROMEO:\n") + 20)  # it is decoding
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert_one_line(errors.decode(), "interrupted")
    assert files_in(tmp_path) == set()


def hears_interrupts():
    """Shells start what runs in their background deaf to them, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_engine_that_fails_to_load_leaves_transformers_as_it_was(sharded, checkpoint):
    """Loading replaces the experts' constructor for a while."""
    missing_norm(sharded)
    with pytest.raises(ResidencyError):
        tiny_engine(sharded)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert any(name.endswith("gate_up_proj") for name, _ in model.named_parameters())


def test_the_demo_may_be_copied_and_run_from_elsewhere(tmp_path):
    source = Demo(Demo.Config()).folder
    shutil.copytree(source, tmp_path / "a copy, é")
    result = run_folder(tmp_path / "a copy, é", *DEMO, "-p", "ROMEO:")
    assert result.exit_code == 0, result.stderr
