"""The replaced Qwen4 model against transformers' own, chunk by chunk and token by token."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

# Triton reads this when it is imported, so whoever imports it first must have set it.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from residency.runtime.kernels import gated_delta_chunk, indexer, selected_attention
from residency.runtime.replacements import Seam, apply
from residency.runtime.replacements.qwen4_blocks import ngram_ids
from residency.runtime.replacements.qwen4_exp import reason_against

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5
CAPACITY = 64
END = 7  # of text, drawn often


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(selected_attention, "SPLITS", 2)
        monkeypatch.setattr(selected_attention, "TILE", 16)
        monkeypatch.setattr(selected_attention, "QUERY_TILE", 16)
        monkeypatch.setattr(gated_delta_chunk, "BLOCK", 16)


def _config(**changes: Any) -> Qwen4ExpTextConfig:
    values: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "hc_count": 4,
        "hc_lowrank": 12,
        "ple_layer_ids": [2],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "indexer_n_heads": 8,  # so that no score is zero, where order among equals would count
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "max_position_embeddings": 256,
        "eos_token_id": END,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    }
    return Qwen4ExpTextConfig(**{**values, **changes})


def _model(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(**changes)).to(DEVICE).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name:  # zeros and ones say nothing about a weight's use
            torch.nn.init.normal_(parameter, std=0.3)
        elif "mlp.gate.weight" in name:  # far from ties
            torch.nn.init.normal_(parameter, std=1.0)
        elif "conv1d" in name or "index" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


class Run:
    """One model over one cache, its position kept on the host as the runtime does."""

    def __init__(self, model: PreTrainedModel, cache: Any) -> None:
        self.model = model
        self.cache = cache
        self.position = 0

    @torch.inference_mode()
    def step(self, ids_BS: Tensor) -> Tensor:
        logits: Tensor = self.model(ids_BS, cache=self.cache, use_cache=True).logits
        self.position += ids_BS.shape[1]
        return logits

    def restart(self) -> None:
        self.cache.reset()
        self.position = 0


def _ours(model: PreTrainedModel, capacity: int = CAPACITY) -> Run:
    model = copy.deepcopy(model)
    run = Run(model, StaticCache(config=model.config, max_cache_len=capacity))
    assert apply(model, Seam(lambda: run.position), on_cpu=True)
    return run


def _theirs(model: PreTrainedModel) -> Run:
    return Run(model, DynamicCache(config=model.config))


def _chunks(batch: int, lengths: list[int]) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(1)
    for length in lengths:
        ids = torch.randint(0, 61, (batch, length), generator=rng)
        ids[torch.rand(batch, length, generator=rng) < 0.15] = END
        yield ids.to(DEVICE)


def _assert_close(got: Tensor, want: Tensor, what: str) -> None:
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


CASES = [
    (1, [34, 1, 1, 1, 1, 9, 1], {}),  # far above the budget of three blocks
    (2, [5, 1, 13, 1], {"linear_num_value_heads": 2, "output_gate_type": "silu"}),
    (1, [1, 1, 1, 11, 20], {"norm_topk_prob": False, "hc_count": 2}),
    (1, [7, 1], {"ple_layer_ids": None, "num_hidden_layers": 8}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}")
def test_chunks_and_steps(case: tuple[int, list[int], dict[str, Any]]) -> None:
    batch, lengths, changes = case
    model = _model(**changes)
    ours, theirs = _ours(model), _theirs(model)
    for ids in _chunks(batch, lengths):
        _assert_close(ours.step(ids), theirs.step(ids), str(list(ids.shape)))
    kept, other = ours.cache.layers[3], theirs.cache.layers[3]
    assert int(kept.cumulative_length) == ours.position == sum(lengths)
    _assert_close(kept.keys[:, :, : ours.position], other.keys, "keys")
    _assert_close(kept.indexer_keys[:, : ours.position], other.indexer_keys, "indexer's keys")
    state = ours.cache.layers[0].recurrent_states[0]
    _assert_close(state, theirs.cache.layers[0].recurrent_states[0], "recurrent state")
