"""Shared fixtures: tiny checkpoints as transformers writes them, and engines over them."""

import gc
import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="residency-tests-")  # the user's stays as is
if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

import architectures
import pytest
from hypothesis import settings

from residency.conf import build_engine, compose

torch.set_num_threads(1)  # bits depend on the thread count; tests run side by side as well

# Machines differ in speed; what must pass is judged by the same examples each time.
settings.register_profile("residency", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("residency")


def pytest_collection_finish():
    """Modules outlive the tests. An engine collects garbage when it closes, and to look through
    every module each time would take longer than most tests.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


TINY = architectures.BASE | dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
    num_hidden_layers=3,
    num_experts_per_tok=2,
)


def write_checkpoint(folder: Path, model_type: str, num_experts: int = 8, **changes) -> Path:
    """A random model of `model_type`, written by transformers' save_pretrained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = TINY | {"num_experts": num_experts}
    save = {k: changes.pop(k) for k in ("max_shard_size",) if k in changes}
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **save)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny checkpoint, written when first asked for."""
    root = tmp_path_factory.mktemp("architectures")
    return lru_cache(lambda name: architectures.write(root / name, name))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint for tests that any architecture would do for, float32."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", "qwen3_moe")


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A checkpoint of several shards that a test may damage."""
    return write_checkpoint(tmp_path / "model", "qwen3_moe", max_shard_size="80KB")


def tiny_engine(folder: Path, *overrides: str):
    """An engine over a tiny checkpoint, in float32 on the CPU."""
    base = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cpu"]
    return build_engine(compose([*base, *overrides]))
