"""Checkpoint keys as they are published, where save_pretrained writes others or more."""

import json

import architectures
import pytest
import torch
from conftest import tiny_engine
from safetensors.torch import load_file, save_file

PROMPT = [5, 9, 77, 31, 2, 64]

# Keys of heads that predict further tokens, published beside the model and not run.
FURTHER = {
    "qwen3_next": "mtp.layers.0",
    "qwen3_5_moe": "mtp.layers.0",
    "deepseek_v3": "model.layers.4",  # one behind the model's own
    "glm4_moe": "model.layers.4",
}


def rewritten(source, target, change):
    """The checkpoint in `source` with its tensors changed."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (target / name).write_text((source / name).read_text())
    return target


def logits_of(folder):
    seen = []
    with tiny_engine(folder, "cache.slots=4") as engine:
        engine.generate(PROMPT, max_new_tokens=3, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


def assert_same_model(one, other):
    """Close, not equal: where a mapped file begins moves tensors off 32-byte boundaries."""
    torch.testing.assert_close(logits_of(one), logits_of(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", FURTHER)
def test_heads_that_predict_further_tokens_are_ignored(tiny_checkpoint, tmp_path, model_type):
    prefix = FURTHER[model_type]

    def change(tensors):
        experts = {k: v for k, v in tensors.items() if ".mlp.experts." in k}
        last = max(int(k.split(".layers.")[1].split(".")[0]) for k in experts)
        extra = {
            f"{prefix}.{k.split(f'.layers.{last}.')[1]}": torch.full_like(v, torch.nan)
            for k, v in tensors.items()
            if f".layers.{last}." in k
        }
        assert len(extra) > 20
        norms = {f"{prefix}.{n}.weight": torch.full((64,), torch.nan) for n in ("enorm", "hnorm")}
        return tensors | extra | norms

    source = tiny_checkpoint(model_type)
    changed = rewritten(source, tmp_path / "model", change)
    assert_same_model(changed, source)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen4_exp"])
def test_stacked_experts_are_read_as_well(tiny_checkpoint, tmp_path, model_type):
    """One tensor for all experts of a layer, gate rows before up rows."""

    def change(tensors):
        out = {k: v for k, v in tensors.items() if ".mlp.experts." not in k}
        for layer in range(4):
            prefix = f"model.language_model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(8)])
                for part in ("gate", "up", "down")
            )
            out[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            out[f"{prefix}.down_proj"] = down
        return out

    source = tiny_checkpoint(model_type)
    changed = rewritten(source, tmp_path / "model", change)
    assert_same_model(changed, source)


@pytest.mark.parametrize("model_type", architectures.WRAPPED)
def test_a_text_model_of_its_own_is_read_like_the_wrapped_one(
    tiny_checkpoint, tmp_path, model_type
):
    """The text part's config at the top, its keys without `language_model.`; no vision."""

    def change(tensors):
        text = {k: v for k, v in tensors.items() if ".visual." not in k}
        return {k.replace("model.language_model.", "model."): v for k, v in text.items()}

    source = tiny_checkpoint(model_type)
    changed = rewritten(source, tmp_path / "model", change)
    config = json.loads((source / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config["text_config"]))
    assert_same_model(changed, source)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w2.weight"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("deepseek_v2", "model.layers.1.mlp.experts.0.gate_proj.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen4_exp", "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
         ".shard_0.weight"),
    ],
)  # fmt: skip
def test_tiny_checkpoints_have_the_published_keys(tiny_checkpoint, model_type, key):
    tensors = load_file(tiny_checkpoint(model_type) / "model.safetensors")
    assert key in tensors
    assert "bias" not in key or tensors[key].unique().numel() > 1  # not left at zero
