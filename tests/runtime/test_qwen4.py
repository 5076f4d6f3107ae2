"""The replaced Qwen4 model against transformers' own, chunk by chunk and token by token."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import tiny_engine, write_checkpoint
from qwen4 import END, SIZES
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

# Triton reads this when it is imported, so whoever imports it first must have set it.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from residency.runtime.hooks import add_experts
from residency.runtime.kernels import gated_delta_chunk, selected_attention
from residency.runtime.replacements import Seam, apply
from residency.runtime.replacements.qwen4_blocks import ngram_ids
from residency.runtime.replacements.qwen4_exp import reason_against

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5 if DEVICE.type == "cpu" else 3e-4  # products by TF32, three for one
CAPACITY = 64


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(selected_attention, "SPLITS", 2)
        monkeypatch.setattr(selected_attention, "TILE", 16)
        monkeypatch.setattr(selected_attention, "QUERY_TILE", 16)
        monkeypatch.setattr(gated_delta_chunk, "BLOCK", 16)


def _config(**changes: Any) -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(**{**SIZES, **changes})


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

    @torch.inference_mode()
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


SHORT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"]}
CASES = [
    (1, [18, 1, 9, 1], {"ple_layer_ids": [1], **SHORT}),  # far above the budget of 3 blocks
    (2, [4, 1], {"ple_layer_ids": [1], "output_gate_type": "silu", **SHORT}),
    (1, [1, 1, 11], {"norm_topk_prob": False, "hc_count": 2, "ple_layer_ids": None, **SHORT}),
]
# Each takes tens of seconds in the interpreter; on a GPU all of them run.
CASES_PARAM = [CASES[0], *(pytest.param(case, marks=pytest.mark.gpu) for case in CASES[1:])]


@pytest.mark.parametrize("case", CASES_PARAM, ids=lambda case: f"{case[0]}x{case[1]}")
def test_chunks_and_steps(case: tuple[int, list[int], dict[str, Any]]) -> None:
    batch, lengths, changes = case
    model = _model(**changes)
    ours, theirs = _ours(model), _theirs(model)
    for ids in _chunks(batch, lengths):
        _assert_close(ours.step(ids), theirs.step(ids), str(list(ids.shape)))
    kept, other = ours.cache.layers[1], theirs.cache.layers[1]
    assert int(kept.cumulative_length) == ours.position == sum(lengths)
    _assert_close(kept.keys[:, :, : ours.position], other.keys, "keys")
    _assert_close(kept.indexer_keys[:, : ours.position], other.indexer_keys, "indexer's keys")
    state = ours.cache.layers[0].recurrent_states[0]
    _assert_close(state, theirs.cache.layers[0].recurrent_states[0], "recurrent state")


@pytest.mark.gpu
def test_below_the_budget_nothing_is_indexed() -> None:
    model = _model(ple_layer_ids=None, **SHORT)
    ours, theirs = _ours(model, 12), _theirs(model)
    for ids in _chunks(1, [3, 1]):
        _assert_close(ours.step(ids), theirs.step(ids), str(list(ids.shape)))
    assert ours.cache.layers[1].indexer_keys is None


def test_a_restarted_cache_is_a_new_one() -> None:
    ours = _ours(_model(ple_layer_ids=[1], **SHORT))
    first, second = (list(_chunks(1, [1, 1])) for _ in range(2))
    want = [ours.step(ids) for ids in first]
    ours.restart()
    for ids, logits in zip(second, want, strict=True):
        assert torch.equal(ours.step(ids), logits)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_hashes_of_ngrams(size: int) -> None:
    """Bit for bit, chunk by chunk, with ends of text within reach."""
    config = _config(ngram_size=size, ple_embed_dim=4 * (size - 1) * 2)
    own = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0)
    asked: list[Tensor] = []

    def rows(ids: Tensor) -> Tensor:
        asked.append(ids)
        return torch.zeros(*ids.shape, 4)

    own.ngram_embedding.forward = rows
    (ids,) = (part.cpu() for part in _chunks(3, [40]))
    ids[ids % 3 == 0] = END
    own(ids, None)
    context = torch.full((3, size - 1), END)
    got = []
    for part in ids.split([1, 12, 2, 25], 1):
        seen = torch.cat([context, part], 1)
        got.append(ngram_ids(seen, part.shape[1], own))
        context = seen[:, 1 - size :]
    assert torch.equal(torch.cat(got, 1), asked[0])


def test_no_second_copy_of_the_weights() -> None:
    ours = _ours(_model(ple_layer_ids=[1], **SHORT))
    first, second = ours.model.model.layers
    for parts in (
        [getattr(first.linear_attn, f"in_proj_{n}") for n in ("qkv", "z", "b", "a")],
        [*(getattr(second.self_attn, f"{n}_proj") for n in "qkv"),
         second.self_attn.indexer.index_qk_proj],
        [first.mlp.gate, first.mlp.shared_expert.gate_proj, first.mlp.shared_expert.up_proj,
         first.mlp.shared_expert_gate],
    ):  # fmt: skip
        storage = parts[0].weight.untyped_storage()
        assert storage.nbytes() == sum(part.weight.nbytes for part in parts)


def test_masks_and_other_caches_are_refused() -> None:
    ours = _ours(_model(ple_layer_ids=None, **SHORT))
    ids = next(_chunks(1, [4]))
    with pytest.raises(ValueError, match="takes token ids alone"):
        ours.model(ids, attention_mask=torch.ones_like(ids), cache=ours.cache)
    with pytest.raises(TypeError, match="needs a StaticCache, not one of DynamicIndexedLayer"):
        ours.model(ids, cache=DynamicCache(config=ours.model.config))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "biases"),
        ({"head_dim": 24}, "head_dim=24"),
        ({"indexer_compress_ratio": 3}, "blocks of 3 keys"),
        ({"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}, "no attention layer"),
    ],
)
def test_what_the_kernels_do_not_cover_stays(changes: dict[str, Any], reason: str) -> None:
    model = _model(**{"ple_layer_ids": None, **SHORT, **changes})
    found = reason_against(model)
    assert found is not None and reason in found
    assert apply(model, Seam(lambda: 0), on_cpu=True) == []
    assert "forward" not in vars(model.model)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine is on the CPU: for the interpreter")
def test_in_an_engine_over_a_host_table(tmp_path: Any) -> None:
    """The runtime's experts, position and table, against the engine without replacements."""
    folder = write_checkpoint(
        tmp_path / "model", "qwen4_exp_text", **{**SIZES, **SHORT, "ple_layer_ids": [1]}
    )
    runs = []
    for replaced in (False, True):
        seen: list[Tensor] = []
        with tiny_engine(folder) as engine:
            if replaced:
                seam = Seam(lambda: engine.runtime.position, add_experts)
                assert apply(engine.model, seam, on_cpu=True)
            engine.generate([5, END, 9, 11], max_new_tokens=2, on_logits=seen.append)
        runs.append(torch.stack(seen))
    _assert_close(runs[1], runs[0], "logits")
