"""Replaced models against transformers' own, chunk by chunk and token by token."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3MoeConfig,
    StaticCache,
)

# Triton reads this when it is imported, so whoever imports it first must have set it.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from residency.runtime.batch_cache import BatchCache
from residency.runtime.kernels import attention
from residency.runtime.kernels.attention import AttendConfig
from residency.runtime.kernels.rotary import KeyValues
from residency.runtime.replacements import Seam, apply, pieces
from residency.runtime.replacements.pieces import Pieces
from residency.runtime.replacements.qwen3_moe import reason_against
from residency.runtime.replacements.seam import call_and_add

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter cuts off what does not fit bf16 instead of rounding it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2 if DEVICE.type == "cuda" else 1e-1}
CONTEXT = 64


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention, "ATTEND_CONFIGS", [AttendConfig(4, 16, 4, 1)])


def _config(**changes: Any) -> Qwen3MoeConfig:
    values: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 40,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": CONTEXT,
    }
    return Qwen3MoeConfig(**{**values, **changes})


def _model(dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(**changes)).to(DEVICE, dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones say nothing about a weight's use
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "mlp.gate.weight" in name:  # far from ties, so that rounding changes no route
            torch.nn.init.normal_(parameter, std=1.0)
    return model


class Run:
    """One model over one static cache, its position kept on the host as the runtime does."""

    def __init__(self, model: PreTrainedModel, context: int = CONTEXT) -> None:
        self.model = model
        self.restart(context)

    def restart(self, context: int) -> None:
        self.position = 0
        self.cache = StaticCache(config=self.model.config, max_cache_len=context)

    @torch.inference_mode()
    def step(self, ids_BS: Tensor) -> Tensor:
        logits: Tensor = self.model(ids_BS, cache=self.cache, use_cache=True).logits
        self.position += ids_BS.shape[1]
        return logits


def _pair(model: PreTrainedModel, context: int = CONTEXT) -> tuple[Run, Run, list[str]]:
    ours = Run(copy.deepcopy(model), context)
    names = apply(ours.model, Seam(lambda: ours.position), on_cpu=True)
    return Run(model, context), ours, names


def _chunks(batch: int, lengths: list[int]) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(1)
    for length in lengths:
        yield torch.randint(0, 61, (batch, length), generator=rng).to(DEVICE)


def _assert_same_run(model: PreTrainedModel, batch: int, lengths: list[int]) -> None:
    theirs, ours, names = _pair(model)
    assert names
    for ids in _chunks(batch, lengths):
        want, got = theirs.step(ids), ours.step(ids)
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < TOLERANCE[got.dtype], f"{list(ids.shape)}: relative error {error:.2e}"
    for mine, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        assert int(mine.cumulative_length) == int(other.cumulative_length) == sum(lengths)
        for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
            error = (a.double() - b.double()).norm() / b.double().norm()
            assert error < TOLERANCE[a.dtype], f"cache: relative error {error:.2e}"


CASES = [
    (1, [11, 5, 1, 1, 1], {}),
    (1, [3, 13, 9, 1, 1], {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}),
    (4, [6, 1, 1], {"norm_topk_prob": False}),
    (4, [1, 1, 2, 1], {"mlp_only_layers": [1]}),
    (9, [1], {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}")
def test_chunks_and_steps_in_fp32(case: tuple[int, list[int], dict[str, Any]]) -> None:
    batch, lengths, changes = case
    _assert_same_run(_model(**changes), batch, lengths)


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.gpu)])
def test_chunks_and_steps_in_bf16(batch: int) -> None:
    _assert_same_run(_model(torch.bfloat16, num_experts_per_tok=9), batch, [7, 4, 1, 1])


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[7], [3, 11], [5, 1, 12, 2]], ids=len)
def test_rows_of_their_own_lengths(lengths: list[int]) -> None:
    """Each prefilled alone, then together a token a step: as if each were alone with the original.

    After each step the first row leaves and the last one takes its place.
    """
    model = _model()
    _, ours, names = _pair(model)
    assert names
    alone = [Run(model) for _ in lengths]
    rows: BatchCache | None = None
    for row, (theirs, ids) in enumerate(zip(alone, _chunks(1, lengths), strict=True)):
        ours.restart(CONTEXT)
        ours.step(ids)
        theirs.step(ids)
        rows = rows or BatchCache.like(ours.cache, len(lengths))
        rows.take(row, ours.cache, ours.position)
    assert rows is not None
    for step in range(3):
        ids_B1 = (torch.cat(list(_chunks(1, [1] * len(alone)))) + step) % 61
        live = rows.first(len(alone))
        positions = live.positions_B[:, None]
        got = ours.model(ids_B1, position_ids=positions, cache=live, use_cache=True).logits
        live.positions_B.add_(1)
        for theirs, own, logits in zip(alone, ids_B1, got, strict=True):
            want = theirs.step(own[None])[0]
            error = (logits.double() - want.double()).norm() / want.double().norm()
            assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"
        if len(alone) > 1:
            rows.move(len(alone) - 1, 0)
            alone[0] = alone.pop()


def test_no_second_copy_of_the_weights() -> None:
    _, ours, names = _pair(_model())
    assert names[0] == "Qwen3MoeDecoderLayer x 2: fused kernels"
    for layer in ours.model.model.layers:
        parts = [getattr(layer.self_attn, f"{n}_proj").weight for n in "qkv"]
        storage = parts[0].untyped_storage()
        assert storage.nbytes() == sum(p.nbytes for p in parts)
        assert all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in parts)


def test_the_experts_can_add_the_residual() -> None:
    plain, hooked = copy.deepcopy(_model()), _model()
    seen = []

    def add_experts(experts: Any, *routed_and_residual: Tensor) -> Tensor:
        seen.append(experts)
        return call_and_add(experts, *routed_and_residual)

    apply(plain, Seam(lambda: 0), on_cpu=True)
    apply(hooked, Seam(lambda: 0, add_experts), on_cpu=True)
    ids = next(_chunks(1, [10]))
    assert torch.equal(Run(plain).step(ids), Run(hooked).step(ids))
    assert seen == [layer.mlp.experts for layer in hooked.model.layers]


def test_masks_and_other_caches_are_refused() -> None:
    _, ours, _ = _pair(_model())
    ids = next(_chunks(1, [4]))
    with pytest.raises(ValueError, match="takes no attention_mask"):
        ours.model(ids, attention_mask=torch.ones_like(ids), cache=ours.cache)
    with pytest.raises(TypeError, match="needs a StaticCache, not DynamicCache"):
        ours.model(ids, cache=DynamicCache(config=ours.model.config))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "biases"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding window"),
        ({"head_dim": 24}, "head dimension is 24"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embedding is linear",
        ),
    ],
)
def test_what_the_kernels_do_not_cover_stays(changes: dict[str, Any], reason: str) -> None:
    model = _model(**changes)
    found = reason_against(model)
    assert found is not None and reason in found
    assert apply(model, Seam(lambda: 0), on_cpu=True) == []
    assert "forward" not in vars(model.model.layers[0])


def test_cpu_models_and_other_types_stay() -> None:
    if DEVICE.type == "cpu":
        assert apply(_model(), Seam(lambda: 0)) == []
    other = AutoModelForCausalLM.from_config(
        type(_config()).from_dict(_config().to_dict()), dtype=torch.float32
    )
    other.config.model_type = "unknown"
    assert apply(other, Seam(lambda: 0), on_cpu=True) == []


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
def test_a_captured_step_equals_an_eager_one() -> None:
    _, eager, _ = _pair(_model(torch.bfloat16))
    _, graphed, _ = _pair(_model(torch.bfloat16))
    for ids in _chunks(1, [9, 1]):
        eager.step(ids)
        graphed.step(ids)
    token = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = graphed.step(token)
    for ids in _chunks(1, [1, 1, 1]):
        token.copy_(ids)
        graph.replay()
        assert torch.equal(logits, eager.step(ids))


def _pieces_of(run: Run) -> Pieces:
    found: Pieces = run.model.model.layers[0].forward.__self__._pieces
    return found


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short chunks run in pieces on every device and in every dtype."""
    monkeypatch.setattr(pieces, "suits", lambda hidden_BSH: True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NaN, in the interpreter
@pytest.mark.parametrize(
    ("length", "layers"), [(9, 2), (16, 1), (17, 1), pytest.param(40, 1, marks=pytest.mark.gpu)]
)
def test_padded_chunks_equal_plain_ones(
    length: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At position 0, and up to the last place of the cache, where padding would not fit."""
    original, padded, _ = _pair(_model(num_hidden_layers=layers), 2 * length)
    _, plain, _ = _pair(original.model, 2 * length)
    for ids in _chunks(1, [length, length]):
        monkeypatch.setattr(pieces, "suits", lambda hidden_BSH: False)
        want, same = original.step(ids), plain.step(ids)
        monkeypatch.setattr(pieces, "suits", lambda hidden_BSH: True)
        got = padded.step(ids)
        for other in (want, same):
            error = (got.double() - other.double()).norm() / other.double().norm()
            assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"
        _assert_same_caches(padded, plain)
        for buffer in _buffers_of(padded)[:-1]:  # whatever it holds, padding is not seen
            buffer.fill_(float("nan"))


def _assert_same_caches(run: Run, other: Run) -> None:
    for mine, theirs in zip(run.cache.layers, other.cache.layers, strict=True):
        assert int(mine.cumulative_length) == int(theirs.cumulative_length) == run.position
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert torch.equal(a[:, :, run.position :], b[:, :, run.position :])
            error = (a.double() - b.double()).norm() / b.double().norm()
            assert error < TOLERANCE[a.dtype], f"cache: relative error {error:.2e}"


def _buffers_of(run: Run) -> pieces.Buffers:
    buffers = _pieces_of(run)._buffers
    assert buffers is not None
    return buffers


@pytest.mark.usefixtures("everywhere")
def test_pieces_between_other_chunks_and_in_dense_layers() -> None:
    _assert_same_run(_model(mlp_only_layers=[1]), 1, [3, 11, 1, 9, 1])


@pytest.mark.usefixtures("everywhere")
def test_experts_see_no_padding() -> None:
    seen = []

    def add_experts(experts: Any, *tensors: Tensor) -> Tensor:
        seen.append(tensors)
        return call_and_add(experts, *tensors)

    model = _model()
    apply(model, Seam(lambda: 0, add_experts), on_cpu=True)
    Run(model).step(next(_chunks(1, [11])))
    assert [[len(t) for t in tensors] for tensors in seen] == [[11] * 4] * 2
    assert all(t.is_contiguous() for tensors in seen for t in tensors)


@torch.no_grad()
def test_which_chunks_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = torch.zeros(1, 16, 4, dtype=torch.bfloat16, device=DEVICE)
    assert pieces.covers(chunk) == (DEVICE.type == "cuda")
    assert not pieces.covers(chunk.float())
    with torch.enable_grad():
        assert not pieces.covers(chunk)
    monkeypatch.setattr(pieces, "suits", lambda hidden_BSH: True)
    lengths = [n for n in range(1, 600) if pieces.covers(torch.empty(1, n, 1))]
    assert lengths == list(range(2, 513))
    assert not pieces.covers(torch.empty(2, 16, 1))
    assert [pieces.bucket_of(n) for n in (2, 16, 17, 64, 257, 512)] == [16, 16, 32, 64, 512, 512]


class _Graph:
    def __init__(self, body: Any) -> None:
        self.replay = body


def test_the_second_use_captures_until_the_cache_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, done = Pieces(pieces.Sizes(4, 2, 4, 2)), []
    x, cos, position = torch.ones(9, 4), torch.ones(1, 9, 4), torch.zeros(())
    chunk = mine.enter(x, cos, cos)
    assert mine.enter(x, cos, cos).padded is chunk.padded  # the next layer of the same chunk

    def use(capacity: int) -> list[str]:
        done.clear()
        kept = KeyValues(caches[capacity], caches[capacity])
        mine.follow(0, kept, position)
        mine.run(0, 0, chunk, lambda: done.append("eager"))
        return done

    caches = {n: torch.zeros(1, 2, n, 4) for n in (16, 32)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(mine.graphs, "_capture", lambda body: _Graph(lambda: done.append("graph")))
    assert [use(n)[0] for n in (16, 16, 16, 32, 32, 16)] == [
        *("eager", "graph", "graph", "eager", "graph", "eager")
    ]
    monkeypatch.setattr(mine.graphs, "_capture", lambda body: None)
    assert use(16) == ["eager"]


def _gpu_runs() -> tuple[Run, Run]:
    _, captured, _ = _pair(_model(torch.bfloat16), 256)
    _, eager, _ = _pair(_model(torch.bfloat16), 256)
    _pieces_of(eager).graphs.captures = False
    return captured, eager


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
def test_captured_chunks_equal_eager_ones() -> None:
    captured, eager = _gpu_runs()
    for context in (256, 320):  # another cache, then buckets by turns
        for ids in _chunks(1, [12, 12, 40, 16, 1, 33, 9, 40, 5, 64]):
            assert torch.equal(captured.step(ids), eager.step(ids))
        for mine, theirs in zip(captured.cache.layers, eager.cache.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
            assert int(mine.cumulative_length) == captured.position
        assert len(_pieces_of(captured).graphs) == 8
        assert len(_pieces_of(eager).graphs) == 0
        captured.restart(context + 64)
        eager.restart(context + 64)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
def test_capturing_while_copies_are_in_flight() -> None:
    captured, eager = _gpu_runs()
    lane = torch.cuda.Stream()
    host = torch.ones(1 << 26, dtype=torch.uint8).pin_memory()
    for ids in _chunks(1, [20, 20, 20]):
        with torch.cuda.stream(lane):
            copies = [host.to(DEVICE, non_blocking=True) for _ in range(8)]
        assert torch.equal(captured.step(ids), eager.step(ids))
        lane.synchronize()
        assert all(bool((copy == 1).all()) for copy in copies)
    assert len(_pieces_of(captured).graphs) > 0
