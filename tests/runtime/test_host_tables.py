"""Host tables: never whole on the device, mapped or read, counted, and equal to the embedding."""

import json

import pytest
import torch
from conftest import tiny_engine, write_checkpoint
from qwen4 import SIZES
from transformers import AutoModelForCausalLM

from residency.conf import build_engine, compose
from residency.policies.errors import CheckpointError
from residency.policies.step import Phase
from residency.runtime.architecture import Architecture
from residency.runtime.counters import LINK_SOURCES, Source
from residency.runtime.host_tables import HostTable
from residency.runtime.models.qwen4_exp import Qwen4Exp
from residency.runtime.weights import CheckpointWeights

PROMPT = list(range(3, 14))
NUM_NEW = 3
WIDTH, READS = 8, 4  # of the tiny model: elements of a row, rows of a token
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen4") / "model", "qwen4_exp_text", **SIZES)


@pytest.fixture(scope="module")
def original(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights_of(folder, dtype="float32"):
    return CheckpointWeights(Architecture.of(folder, dtype), folder)


def test_an_engine_equals_transformers(folder, original):
    seen = []
    with tiny_engine(folder) as engine:
        report = engine.generate(
            PROMPT, max_new_tokens=NUM_NEW, ignore_eos=True, on_logits=seen.append
        )
        table = engine.model.get_submodule(TABLE)
        assert isinstance(table, HostTable)
        assert not any("ngram" in name for name, _ in engine.model.named_parameters())
        assert engine.runtime.plan.table_bytes == table.shape.num_rows * WIDTH * 4
        assert engine.runtime.plan.mapped_tables
    ids = torch.tensor([PROMPT + report.token_ids[:-1]])
    with torch.inference_mode():
        want = original(ids).logits[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(seen), want, rtol=0, atol=1e-5)
    moved = {phase.phase: phase.bytes[Source.TABLE] for phase in report.phases}
    assert moved == {
        Phase.PREFILL: len(PROMPT) * READS * WIDTH * 4,
        Phase.DECODE: (NUM_NEW - 1) * READS * WIDTH * 4,
    }
    assert {row.layer for row in report.counters if row.bytes[Source.TABLE]} == {1}
    assert Source.TABLE in LINK_SOURCES


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_the_embedding_s(folder, original, mapped, dtype):
    (table,) = weights_of(folder, dtype).tables(mapped, None)
    ids = torch.randint(0, table.shape.num_ids, (2, 5, READS))
    want = original.get_submodule(TABLE)(ids).to(getattr(torch, dtype))
    assert torch.equal(table(ids), want)
    assert len(table._parts) == (SIZES["split_ngram_parts"] if mapped else 1)
    if not mapped:
        assert table.memory.data_ptr() == table.weight.data_ptr()


def test_what_stays_of_the_plan(folder):
    architecture = Architecture.of(folder, "float32")
    (table,) = architecture.tables
    assert (table.name, table.width, table.reads, table.layer) == (TABLE, WIDTH, READS, 1)
    assert f"{TABLE}.weight" not in architecture.other_shapes


def test_a_damaged_table_is_refused(folder, tmp_path):
    for changes, message in (
        ({"ngram_vocab_size_base": 90}, "rows of"),
        ({"ple_layer_ids": [3]}, "missing"),
    ):
        config = json.loads((folder / "config.json").read_text()) | changes
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            weights_of(tmp_path).tables(True, None)


@pytest.fixture
def small(monkeypatch):
    """The preset at the tiny model's sizes; layers are its own."""
    sizes = {**Qwen4Exp.sizes, **SIZES, "num_hidden_layers": 48}
    monkeypatch.setattr(Qwen4Exp, "sizes", sizes)


def made_up(*overrides):
    base = ["workload=bench", "workload.lengths=[16]", "model=qwen4_exp", "model.layers=4"]
    base.append("device=cpu")
    return compose([*base, *overrides])


def test_a_made_up_table_is_cut(small):
    with build_engine(made_up("model.table_rows=100", "model.format=bf16")) as engine:
        table = engine.model.get_submodule(TABLE)
        assert engine.runtime.plan.table_bytes == table.weight.nbytes == 100 * WIDTH * 2
        assert not engine.runtime.plan.mapped_tables
        ids = torch.tensor([[3, 103], [203, 7]])
        assert torch.equal(table(ids), table.weight[torch.tensor([[3, 3], [3, 7]])])
        report = engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
        assert len(report.token_ids) == 2
        assert any("100 of 256 rows" in note for note in report.notes)


def test_the_preset_is_the_real_model_s():
    """Read from the config alone, so nothing large is taken."""
    architecture = compose(["model=qwen4_exp"]).model.architecture
    space = architecture.space
    assert (space.num_layers, space.num_experts, space.top_k) == (48, 512, 10)
    weights = 3 * 2560 * 640
    assert architecture.layout.row_bytes == weights // 2 + weights // 16 + 2 * 64  # nvfp4
    (table,) = architecture.tables
    assert (table.num_ids, table.width, table.reads) == (320_001_536, 160, 16)
    assert table.num_elements * 2 == pytest.approx(2 * 2**30, rel=1e-6)
    kinds = architecture.config.layer_types
    assert kinds.count("indexed_attention") == 12 and kinds[3] == "indexed_attention"


@pytest.mark.parametrize("override", ["model.layers=3", "model.table_rows=-1"])
def test_values_that_cannot_work_are_conflicts(override):
    (conflict, *_) = compose(["workload=bench", "model=qwen4_exp", override]).conflicts()
    assert conflict.keys == (override,)
