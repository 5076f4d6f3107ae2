"""Shared fixtures: tiny checkpoints as transformers writes them, and engines over them."""

import os
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from residency.conf import build_engine, compose

torch.set_num_threads(1)  # bits depend on the thread count; tests run side by side as well

# Machines differ in speed; what must pass is judged by the same examples each time.
settings.register_profile("residency", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("residency")

ARCHITECTURES = ("qwen3_moe", "olmoe", "mixtral", "qwen2_moe")
TINY = dict(
    hidden_size=64,
    intermediate_size=32,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    num_experts_per_tok=2,
    max_position_embeddings=512,
    initializer_range=0.2,  # large enough that routes and tokens differ
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)
EXPERTS_KEY = {"mixtral": "num_local_experts"}


def write_checkpoint(folder: Path, model_type: str, num_experts: int = 8, **changes) -> Path:
    """A random model of `model_type`, written by transformers' save_pretrained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = TINY | {EXPERTS_KEY.get(model_type, "num_experts"): num_experts}
    save = {k: changes.pop(k) for k in ("max_shard_size",) if k in changes}
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **save)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """One tiny checkpoint of each architecture, float32."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def checkpoint(checkpoints) -> Path:
    return checkpoints["qwen3_moe"]


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A checkpoint of several shards that a test may damage."""
    return write_checkpoint(tmp_path / "model", "qwen3_moe", max_shard_size="80KB")


def tiny_engine(folder: Path, *overrides: str):
    """An engine over a tiny checkpoint, in float32 on the CPU."""
    base = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cpu"]
    return build_engine(compose([*base, *overrides]))
