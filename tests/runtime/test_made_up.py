"""Models of a real shape and made-up weights, scaled down here."""

import pytest
import torch

from residency.conf import build_engine, compose
from residency.conf.options import option_names
from residency.runtime.models.flash_next_moe import FlashNextMoe
from residency.runtime.models.gpt_oss_20b import GptOss20b
from residency.runtime.models.qwen3_30b_a3b import Qwen330bA3b

PRESETS = [Qwen330bA3b, FlashNextMoe, GptOss20b]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "sliding_window": 8,
}
SHAPES = {
    "qwen3_30b_a3b": (48, 128, 8, 3 * 2048 * 768 * 2),
    # Codes, scales of sixteen, and two outer factors in 64 bytes for each of two matrices.
    "flash_next_moe": (48, 512, 10, 3 * 2560 * 640 * 9 // 16 + 2 * 64),
    "gpt_oss_20b": (24, 32, 4, 3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2),
}
PROMPT = list(range(3, 40))


@pytest.fixture(params=PRESETS, ids=lambda cls: cls.__module__.rpartition(".")[2])
def preset(request, monkeypatch):
    """The name of a preset whose sizes are small now; layers and experts are its own."""
    cls = request.param
    small = {key: SMALL.get(key, size) for key, size in cls.sizes.items()}
    monkeypatch.setattr(cls, "sizes", small)
    return cls.__module__.rpartition(".")[2]


def engine_of(preset, *overrides):
    base = [f"model={preset}", "model.layers=2", "model.context=256", "device=cpu"]
    base.append("workload.lengths=[16]")
    return build_engine(compose(["workload=bench", *base, *overrides]))


def logits_of(engine):
    seen = []
    engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_is_the_real_model_s(name):
    """Read from the config alone, so nothing large is taken."""
    architecture = compose([f"model={name}"]).model.architecture
    space = architecture.space
    shape = (space.num_layers, space.num_experts, space.top_k, architecture.layout.row_bytes)
    assert shape == SHAPES[name]
    assert architecture.dtype == torch.bfloat16


def test_every_preset_is_an_option():
    assert set(SHAPES) <= set(option_names("model"))


@pytest.mark.parametrize("routing", ["model", "even", "skewed"])
def test_a_preset_runs_and_says_that_it_is_made_up(preset, routing):
    with engine_of(preset, f"model.routing={routing}", "model.dtype=float32") as engine:
        assert engine.architecture.space.num_layers == 2
        report = engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
        assert len(report.token_ids) == 4
        assert any(note.startswith("weights: made up (2 of ") for note in report.notes)
        assert any(note.startswith(f"routing: {routing}") for note in report.notes)
        assert engine.made_up


def test_policies_leave_the_bits_alone(preset):
    exact = ("model.dtype=float32", "cache.slots=all")
    with engine_of(preset, *exact) as engine:
        expected = logits_of(engine)
    assert expected.isfinite().all()
    for choice in (
        ["prefill=always_stream", "cache.slots=16"],
        ["prefill=hit_d2d", "cache.slots=16"],
        ["prefill=demand", "cache.slots=16"],
        ["decode=cpu"],
    ):
        with engine_of(preset, "model.dtype=float32", *choice) as engine:
            assert torch.equal(logits_of(engine), expected), choice


def test_the_seed_makes_the_weights(preset):
    def weights(seed):
        with engine_of(preset, f"model.seed={seed}", "model.layers=1") as engine:
            return engine.banks.layers[0].clone(), engine.model.get_input_embeddings().weight

    (bank, embedding), again, other = weights(1), weights(1), weights(2)
    assert torch.equal(bank, again[0]) and torch.equal(embedding, again[1])
    assert not torch.equal(bank, other[0]) and not torch.equal(embedding, other[1])


def test_experts_differ(preset):
    with engine_of(preset) as engine:
        rows = torch.cat(engine.banks.layers)
        assert len(rows.unique(dim=0)) == len(rows)
        assert std_of(engine) == pytest.approx(0.02, rel=0.1)


def std_of(engine):
    layout, views = engine.banks.layout, engine.banks.weights(0)
    stored = {suffix: views[part] for suffix, part in layout.suffixes("down_proj").items()}
    return float(layout.format.dequantise(stored, torch.float32).std())


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "nvfp4", "mxfp4"])
def test_any_format_can_be_made_up(name, monkeypatch):
    wide = {"hidden_size": 128, "moe_intermediate_size": 128}
    small = {key: SMALL.get(key, size) for key, size in Qwen330bA3b.sizes.items()}
    monkeypatch.setattr(Qwen330bA3b, "sizes", small | wide)
    with engine_of("qwen3_30b_a3b", f"model.format={name}") as engine:
        assert engine.banks.layout.format.name == name
        assert logits_of(engine).isfinite().all()
        assert std_of(engine) == pytest.approx(0.02, rel=0.1)
        assert f"experts in {name}" in engine.notes[0]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.layers=-1", "layers"),
        ("model.format=gguf", "fp8_block"),
        ("model.layers=49", "layers"),
        ("model.seed=-1", "2^63"),
        ("model.routing=trace:none.npz", "no such file"),
        ("model.context=50000", "contexts"),
    ],
)
def test_values_that_cannot_work_are_conflicts(override, reason):
    config = compose(["workload=bench", "model=qwen3_30b_a3b", override])
    (conflict, *_) = config.conflicts()
    assert conflict.keys == (override,)
    assert reason in conflict.reason


def test_text_needs_a_tokenizer():
    (conflict, *_) = compose(["model=flash_next_moe"]).conflicts()
    assert "made up" in conflict.reason and conflict.mend == "model=demo"
    assert not list(compose(["workload=bench", "model=flash_next_moe"]).conflicts())


def test_a_format_that_cannot_hold_the_experts_is_a_conflict():
    preset = ["workload=bench", "model=gpt_oss_20b"]
    (conflict,) = compose([*preset, "model.format=fp8_block"]).conflicts()
    assert conflict.keys == ("model.format=fp8_block",) and "128" in conflict.reason
    (conflict,) = compose([*preset, "model.format=bf16", "model.dtype=float32"]).conflicts()
    assert conflict.keys == ("model.format=bf16",) and conflict.mend == "model.format=auto"
