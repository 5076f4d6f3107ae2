"""Loading: every byte once and in its place, in little memory, for every architecture's names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import write_checkpoint
from quantised import SINGLE, write_gpt_oss, write_pair
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from residency.policies.errors import CheckpointError
from residency.runtime import bank_reader, shards
from residency.runtime.architecture import Architecture
from residency.runtime.checkpoint import Checkpoint
from residency.runtime.expert_sources import ExpertSources
from residency.runtime.loading import load_banks
from residency.runtime.weights import CheckpointWeights

CPU = torch.device("cpu")
MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
NGRAMS = dict(ngram_vocab_size_base=50, heads_per_ngram=2, split_ngram_parts=4, ple_layer_ids=[1])
INDEXER = dict(n_heads=2, kv_heads=1, head_dim=16, budget=16, compress_ratio=4)
SHAPES = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "olmoe": {},
    "mixtral": {},
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "qwen4_exp_text": HYBRID
    | NGRAMS
    | {f"indexer_{key}": value for key, value in INDEXER.items()}
    | dict(layer_types=["linear_attention", "indexed_attention"], hc_lowrank=8, head_dim=16),
    "gpt_oss": dict(
        num_local_experts=8, head_dim=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek_v2": MLA | dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1),
    "deepseek_v3": MLA
    | dict(n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=8),
    "glm4_moe": dict(n_routed_experts=8, first_k_dense_replace=1, head_dim=16),
    "minimax_m2": dict(num_local_experts=8, head_dim=16, rotary_dim=8),
}


def weights_of(folder, dtype="auto"):
    return CheckpointWeights(Architecture.of(folder, dtype), folder)


@pytest.fixture(scope="module", params=SHAPES)
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    changes = SHAPES[request.param] | {"num_hidden_layers": 2}
    return write_checkpoint(folder, request.param, max_shard_size="150KB", **changes)


def test_every_weight_is_the_library_s_own(written):
    """Experts by the banks' views, all others as from_pretrained has them, bit for bit."""
    expected = dict(AutoModelForCausalLM.from_pretrained(written).named_parameters())
    weights = weights_of(written)
    modules = weights.architecture.expert_modules
    banks = weights.banks(CPU, None)
    found = dict(weights.model(CPU).named_parameters())
    for layer, module in enumerate(modules):
        for name, rows in banks.weights(layer).items():
            found[f"{module}.{name}"] = rows
    for table in weights.tables(mapped=False, progress=None):
        found[f"{table.shape.name}.weight"] = table.weight
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not weights.notes()


def test_buffers_are_the_library_s_own(written):
    expected = dict(AutoModelForCausalLM.from_pretrained(written).named_buffers())
    found = dict(weights_of(written).model(CPU).named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_another_dtype_is_converted_as_the_library_does(checkpoint):
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    banks = weights_of(checkpoint, "bfloat16").banks(CPU, None)
    experts = expected.get_submodule("model.layers.1.mlp.experts")
    for name, rows in banks.weights(1).items():
        assert torch.equal(rows, getattr(experts, name))


def test_generation_settings_come_along(tmp_path):
    folder = write_checkpoint(tmp_path, "qwen3_moe")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert weights_of(folder).model(CPU).generation_config.eos_token_id == [5, 7]


def test_a_model_that_its_config_wraps(tmp_path):
    changes = SHAPES["qwen3_5_moe_text"] | {"num_hidden_layers": 2}
    inner = write_checkpoint(tmp_path, "qwen3_5_moe_text", **changes)
    expected = dict(weights_of(inner).model(CPU).named_parameters())
    text = json.loads((inner / "config.json").read_text())
    wrapper = {"model_type": "qwen3_5_moe", "text_config": text, "dtype": "float32"}
    (inner / "config.json").write_text(json.dumps(wrapper))
    found = dict(weights_of(inner).model(CPU).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_tensors_of_nobody_are_one_note(tmp_path):
    folder = write_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(folder / SINGLE)
    tensors |= {f"mtp.layers.0.{n}.weight": torch.ones(3) for n in "abc"}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    weights = weights_of(folder)
    weights.model(CPU)
    (note,) = weights.notes()
    assert note == "checkpoint: 3 tensors are not the model's, e.g. mtp.layers.0.a.weight"


def test_stacked_keys_are_as_good_as_one_key_an_expert(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    one, other = (weights_of(folder).banks(CPU, None) for folder in (checkpoint, tmp_path))
    require_equal(one, other)


def require_equal(banks, others):
    """The same bytes in every part of every row; what lies between parts is nobody's."""
    for layer in range(banks.space.num_layers):
        for name, rows in banks.weights(layer).items():
            other = others.weights(layer)[name]
            assert torch.equal(rows.view(torch.uint8), other.view(torch.uint8)), (layer, name)


class Reads:
    """Every byte that is read, by file."""

    def __init__(self, monkeypatch, shortest=None):
        self.ranges = []
        real = os.preadv

        def preadv(descriptor, buffers, offset):
            if shortest:  # as the system may
                buffers = [buffers[0][:shortest]]
            read = real(descriptor, buffers, offset)
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            self.ranges.append((name, offset, offset + read))
            return read

        monkeypatch.setattr(os, "preadv", preadv)


def banks_of(folder, progress=None):
    architecture = Architecture.of(folder, "auto")
    sources = ExpertSources(architecture, Checkpoint(folder))
    return load_banks(architecture, sources, progress), sources


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads file names in /proc")
def test_each_byte_is_read_once(tmp_path, monkeypatch):
    sharded = write_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1, max_shard_size="80KB")
    reads = Reads(monkeypatch)
    monkeypatch.setattr(bank_reader, "GAP_BYTES", 0)
    _, sources = banks_of(sharded)
    entries = [source.entry for source in sources.sources]
    wanted = {(str(e.file), o) for e in entries for o in range(e.offset, e.offset + e.num_bytes)}
    seen = [(name, o) for name, start, end in reads.ranges for o in range(start, end)]
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted


@pytest.mark.parametrize("limit", [("RUN_BYTES", 1), ("RUN_PIECES", 1), ("PASSING_BYTES", 1)])
@pytest.mark.parametrize("shortest", [None, 1000])
def test_how_reads_are_cut_does_not_matter(tmp_path, monkeypatch, limit, shortest):
    quantised, _ = write_pair(tmp_path, "compressed-tensors", num_hidden_layers=1)
    expected, _ = banks_of(quantised)
    monkeypatch.setattr(bank_reader, *limit)
    Reads(monkeypatch, shortest)
    found, _ = banks_of(quantised)
    require_equal(found, expected)


def test_progress_ends_when_every_byte_is_there(tmp_path):
    """Rows of this format have gaps between their parts, which nobody fills."""
    quantised, _ = write_pair(tmp_path, "modelopt")
    calls = []
    banks, _ = banks_of(quantised, lambda *call: calls.append(call))
    assert {what for what, _, _ in calls} == {"experts"}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    filled = sum(part.num_bytes for part in banks.layout.parts) * banks.space.num_ids
    assert filled < banks.num_bytes
    assert {total for _, _, total in calls} == {filled} == {done[-1]}


def test_the_file_cache_is_left_alone_where_there_is_room(checkpoint, monkeypatch):
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: advice.append(args[-1]))
    monkeypatch.setattr(shards, "HAS_ADVICE", True)
    for free, dropped in ((1 << 40, False), (0, True)):
        advice.clear()
        monkeypatch.setattr("residency.runtime.loading.free_host_bytes", lambda free=free: free)
        banks_of(checkpoint)
        assert os.POSIX_FADV_SEQUENTIAL in advice
        assert (os.POSIX_FADV_DONTNEED in advice) is dropped


def test_a_file_that_shrinks_after_its_header_was_read(sharded):
    architecture = Architecture.of(sharded, "auto")
    sources = ExpertSources(architecture, Checkpoint(sharded))
    file = sources.sources[-1].entry.file
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"{file.name}: ends at byte"):
        load_banks(architecture, sources)


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from residency.runtime.architecture import Architecture
from residency.runtime.checkpoint import Checkpoint
from residency.runtime.expert_sources import ExpertSources
from residency.runtime.loading import load_banks

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon", "RssShmem")  # pages without a file, one's own or shared
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))

torch.set_num_threads(1)
folder = Path(sys.argv[1])
architecture = Architecture.of(folder, sys.argv[2])
torch.ones(1024).to(torch.bfloat16).float()  # what the first operation takes is not the loading's
highest, running = [0], threading.Event()

def sample():
    while not running.wait(0.002):
        highest[0] = max(highest[0], anonymous())

before = anonymous()
thread = threading.Thread(target=sample)
thread.start()
banks = load_banks(architecture, ExpertSources(architecture, Checkpoint(folder)))
running.set()
thread.join()
print(max(highest[0], anonymous()) - before, banks.num_bytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Banks of 201 MB, 16 experts of 6.3 MB in each of two layers, from several shards."""
    return write_checkpoint(
        tmp_path_factory.mktemp("large"),
        "qwen3_moe",
        num_experts=16,
        hidden_size=1024,
        moe_intermediate_size=1024,
        num_hidden_layers=2,
        dtype="bfloat16",
        max_shard_size="90MB",
    )


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads RssAnon in /proc")
def test_peak_memory_is_little_more_than_the_banks(large):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large), "bfloat16"],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, banks = map(int, done.stdout.split())
    assert banks > 200e6
    assert 0.95 * banks < peak <= 1.05 * banks


@pytest.mark.parametrize("naming", ["fp8_block", "modelopt", "compressed-tensors", "mxfp4"])
def test_only_outer_scales_pass_through_memory_of_their_own(tmp_path, naming):
    quantised, _ = write_gpt_oss(tmp_path) if naming == "mxfp4" else write_pair(tmp_path, naming)
    sources = ExpertSources(Architecture.of(quantised, "auto"), Checkpoint(quantised)).sources
    passing = {source.kind.suffix for source in sources if source.stored is not None}
    assert passing <= {"outer"}
