"""What the runtime reads from a config, held against the model that transformers builds of it."""

from dataclasses import replace
from types import SimpleNamespace

import architectures
import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture

CONFIGS = architectures.CONFIGS


def tensors_of(layer):
    for value in vars(layer).values():
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_planned_cache_is_the_cache_that_a_full_context_takes(model_type, dtype):
    context = 40  # beyond gpt_oss's window; the indexer's positions grow with it
    config = architectures.config_of(model_type)
    architecture = Architecture.from_config(config, str(dtype).removeprefix("torch."), "test")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    cache = StaticCache(config=model.config, max_cache_len=context)
    with torch.inference_mode():
        model(torch.arange(context)[None], cache=cache, use_cache=True)
    taken = sum(t.nbytes for layer in cache.layers for t in tensors_of(layer))
    assert architecture.cache_bytes(context) == pytest.approx(taken, rel=0.03)


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("qwen3_moe", [1, 3]),
        ("qwen2_moe", [0, 2]),
        ("qwen3_next", [1, 2, 3]),
        ("deepseek_v2", [1, 2, 3]),
        ("deepseek_v3", [2, 3]),
        ("glm4_moe", [1, 2, 3]),
        ("minimax_m2", [0, 1, 2]),
    ],
)
def test_moe_layers_are_counted_without_the_dense_ones(model_type, layers):
    architecture = Architecture.from_config(architectures.config_of(model_type), "auto", "test")
    assert architecture.expert_modules == tuple(f"model.layers.{i}.mlp.experts" for i in layers)
    assert (architecture.space.num_layers, architecture.space.num_experts) == (len(layers), 8)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_context_and_top_k_are_the_text_models(model_type):
    architecture = Architecture.from_config(architectures.config_of(model_type), "auto", "test")
    assert architecture.max_context == architectures.BASE["max_position_embeddings"]
    assert architecture.space.top_k == architectures.BASE["num_experts_per_tok"]
    assert architecture.workspace.num_bytes(1, 1) > architectures.VOCABULARY


def test_a_config_without_a_longest_context_says_what_to_set():
    config = architectures.config_of("olmoe")
    architecture = Architecture.from_config(config, "auto", "some/config.json")
    silent = SimpleNamespace(get_text_config=SimpleNamespace)
    architecture = replace(architecture, config=silent)
    with pytest.raises(CheckpointError, match=r"some/config\.json.*model\.context"):
        _ = architecture.max_context
