"""Expert kernels against their definitions, on small odd shapes and poisoned outputs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from residency.runtime.formats import Plain
from residency.runtime.kernels import decode_experts, grouped_gemm, grouping
from residency.runtime.kernels.activations import GELU_TANH, SILU, Activation
from residency.runtime.kernels.expert_tiles import ChunkTiles, DecodeConfig, TileShape
from residency.runtime.kernels.formats import ExpertShape

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ON_DEVICE = torch.cuda.is_available()
# Triton's interpreter multiplies bf16 matrices by their bit patterns.
DOT_DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_DEVICE else [])


@dataclass(frozen=True)
class Layer:
    """Random experts in shuffled rows, and a chunk routed to them."""

    shape: ExpertShape
    x: Tensor
    ids: Tensor
    weights: Tensor
    row_of: Tensor
    rows: Tensor


def _layer(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Layer:
    rng = torch.Generator().manual_seed(seed)
    shape = ExpertShape.of(hidden, width, Plain(dtype), dtype)
    gate_up = torch.randn(num_experts, 2 * width, hidden, generator=rng) / hidden**0.5
    down = torch.randn(num_experts, hidden, width, generator=rng) / width**0.5
    row_of = torch.randperm(num_experts + 3, generator=rng)[:num_experts]
    rows = torch.randint(0, 255, (num_experts + 3, shape.row_bytes), generator=rng)
    rows = rows.to(torch.uint8)
    rows[row_of] = shape.pack(gate_up, down)
    scores = torch.rand(num_tokens, num_experts, generator=rng)
    weights, ids = scores.topk(top_k, dim=1)
    x = torch.randn(num_tokens, hidden, generator=rng).to(dtype)
    return Layer(
        shape,
        x.to(device),
        ids.to(device),
        weights.to(device),
        row_of.int().to(device),
        rows.to(device),
    )


def _assert_close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"


SHAPES = [(1, 4, 8, 64, 32), (3, 2, 5, 72, 40), (8, 2, 6, 40, 19), (2, 1, 3, 17, 9)]
KINDS = [
    (torch.float32, torch.int32, SILU),
    (torch.float16, torch.int64, GELU_TANH),
    (torch.bfloat16, torch.int64, SILU),
]


@pytest.mark.parametrize("kind", KINDS, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("extents", SHAPES, ids=str)
def test_decode_pair(
    extents: tuple[int, int, int, int, int],
    kind: tuple[torch.dtype, torch.dtype, Activation],
    device: torch.device,
) -> None:
    dtype, id_dtype, activation = kind
    layer = _layer(*extents, dtype, device)
    layer.row_of[layer.ids[0, 0]] = -1
    routed = (layer.x, layer.ids.to(id_dtype), layer.weights, layer.row_of, layer.rows, layer.shape)
    config = DecodeConfig(16, 32, 4, 1)
    want = decode_experts.gate_up(*routed, activation)
    got = decode_experts.launch_gate_up(*routed, activation, config)
    _assert_close(got.act, want.act)
    assert got.row.tolist() == want.row.tolist()
    assert got.weight.tolist() == want.weight.tolist()
    residual = torch.randn_like(layer.x)
    for added in (None, residual):
        args = (want, layer.rows, layer.shape, added)
        _assert_close(decode_experts.launch_down(*args, config=config), decode_experts.down(*args))


def test_default_decode_configs(device: torch.device) -> None:
    for hidden in (32, 272):  # a row in one block, and in two
        layer = _layer(1, 2, 3, hidden, 9, torch.bfloat16, device)
        routed = (layer.x, layer.ids, layer.weights, layer.row_of, layer.rows, layer.shape, SILU)
        want = decode_experts.down(decode_experts.gate_up(*routed), layer.rows, layer.shape)
        act = decode_experts.launch_gate_up(*routed)
        _assert_close(decode_experts.launch_down(act, layer.rows, layer.shape), want)


def test_decode_ignores_place_and_company(device: torch.device) -> None:
    layer = _layer(3, 2, 5, 80, 10, torch.float32, device)

    def run(tokens: slice, row_of: Tensor, rows: Tensor) -> Tensor:
        routed = (layer.x[tokens], layer.ids[tokens], layer.weights[tokens])
        act = decode_experts.launch_gate_up(*routed, row_of, rows, layer.shape, SILU)
        return decode_experts.launch_down(act, rows, layer.shape)

    together = run(slice(0, 3), layer.row_of, layer.rows)
    moved = layer.rows.flip(0).contiguous()
    row_of = layer.rows.shape[0] - 1 - layer.row_of
    for token in range(3):
        alone = run(slice(token, token + 1), row_of, moved)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("extents", [(1, 1, 1), (5, 2, 4), (40, 3, 7), (300, 4, 12)], ids=str)
def test_grouping(extents: tuple[int, int, int], device: torch.device) -> None:
    num_tokens, top_k, num_experts = extents
    ids = torch.rand(num_tokens, num_experts).topk(top_k, dim=1).indices.to(device)
    want = grouping.group_pairs(ids, num_experts)
    got = grouping.launch_group_pairs(ids, num_experts)
    for name in want._fields:
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name
    flat = ids.flatten().tolist()
    assert got.order.tolist() == sorted(range(len(flat)), key=lambda pair: flat[pair])
    listed = torch.randperm(num_experts)[: max(1, num_experts // 2)].int()
    listed = torch.cat([listed, listed.new_tensor([-1])]).to(device)
    for block_m in (16, 64):
        want_tiles = grouping.tiles_of(want, listed, block_m)
        got_tiles = grouping.launch_tiles_of(got, listed, block_m)
        assert got_tiles.expert.tolist() == want_tiles.expert.tolist()
        assert got_tiles.start.tolist() == want_tiles.start.tolist()


def _run_groups(
    layer: Layer, groups: list[list[int]], config: ChunkTiles | None = None
) -> tuple[Tensor, grouping.Grouping]:
    pairs = grouping.launch_group_pairs(layer.ids, layer.row_of.numel())
    act = layer.x.new_full((layer.ids.numel(), layer.shape.width), float("nan"))
    y = layer.x.new_full((layer.ids.numel(), layer.shape.hidden), float("nan"))
    for group in groups:
        experts = torch.tensor(group, dtype=torch.int32, device=layer.x.device)
        grouped_gemm.launch_run_group(
            layer.x, pairs, experts, layer.row_of, layer.rows, layer.shape, SILU, act, y, config
        )
    return y, pairs


CHUNKS = [(20, 2, 5, 64, 32), (37, 3, 4, 50, 23), (1, 2, 6, 32, 16)]
SMALL_TILES = [
    ChunkTiles(TileShape(16, 32, 32, 4, 2), TileShape(16, 16, 16, 4, 2)),
    ChunkTiles(TileShape(32, 16, 16, 4, 2), TileShape(32, 32, 32, 4, 2)),
]


@pytest.mark.parametrize("tiles", [None, *SMALL_TILES], ids=["chosen", "m16", "m32"])
@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
@pytest.mark.parametrize("extents", CHUNKS, ids=str)
def test_grouped_gemm(
    extents: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    tiles: ChunkTiles | None,
    device: torch.device,
) -> None:
    layer = _layer(*extents, dtype, device)
    everyone = list(range(layer.row_of.numel()))
    y, pairs = _run_groups(layer, [everyone], tiles)
    act, want = layer.x.new_empty(layer.ids.numel(), layer.shape.width), torch.empty_like(y)
    experts = layer.row_of.new_tensor(everyone)
    grouped_gemm.run_group(
        layer.x, pairs, experts, layer.row_of, layer.rows, layer.shape, SILU, act, want
    )
    _assert_close(y, want)
    for residual in (None, torch.randn_like(layer.x)):
        args = (want, pairs, layer.weights, residual)
        _assert_close(grouped_gemm.launch_combine(*args), grouped_gemm.combine(*args))


@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
def test_groups_in_any_order_give_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    layer = _layer(30, 3, 6, 40, 24, dtype, device)
    whole, _ = _run_groups(layer, [[0, 1, 2, 3, 4, 5]])
    assert not whole.isnan().any()
    for groups in ([[5], [3, 1], [0, 2, 4]], [[4, 2], [-1, 0, 5, 1], [3]], [[5, 4, 3, 2, 1, 0]]):
        parts, _ = _run_groups(layer, groups)
        assert torch.equal(parts, whole)


def test_a_group_writes_only_its_experts(device: torch.device) -> None:
    layer = _layer(12, 2, 4, 32, 16, torch.float32, device)
    y, pairs = _run_groups(layer, [[2, 0]])
    owner = layer.ids.flatten()[pairs.order]
    assert torch.equal(~y.isnan().any(dim=1), (owner == 0) | (owner == 2))


def test_decode_and_grouped_forms_agree(device: torch.device) -> None:
    layer = _layer(4, 2, 5, 32, 16, torch.float32, device)
    y, pairs = _run_groups(layer, [list(range(5))])
    act = decode_experts.launch_gate_up(
        layer.x, layer.ids, layer.weights, layer.row_of, layer.rows, layer.shape, SILU
    )
    decoded = decode_experts.launch_down(act, layer.rows, layer.shape)
    _assert_close(decoded, grouped_gemm.launch_combine(y, pairs, layer.weights))
