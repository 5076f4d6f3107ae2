"""Expert kernels over every stored format against its float64 dequantised form."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.formats import FORMATS, ExpertFormat
from residency.runtime.kernels import decode_experts, grouped_gemm, grouping
from residency.runtime.kernels.activations import GELU_ERF, SILU, Activation, clamped_swiglu
from residency.runtime.kernels.expert_tiles import ChunkTiles, DecodeConfig, TileShape
from residency.runtime.kernels.formats import ExpertShape

NUM_TOKENS, NUM_EXPERTS, TOP_K = 2, 3, 2
TINY_TILES = ChunkTiles(TileShape(16, 32, 32, 4, 2), TileShape(16, 16, 64, 4, 2))


class Case:
    """Random experts in shuffled rows, and a few tokens routed to them."""

    def __init__(
        self,
        form: ExpertFormat,
        hidden: int,
        width: int,
        device: torch.device,
        *,
        gpt_oss: bool = False,
        transposed: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = torch.Generator().manual_seed(0)
        self.activation: Activation = clamped_swiglu(1.702, 7.0) if gpt_oss else SILU
        self.shape = ExpertShape.of(
            hidden,
            width,
            form,
            dtype,
            interleaved=gpt_oss,
            has_bias=gpt_oss,
            transposed=transposed,
        )
        sizes = [(2 * width, hidden), (hidden, width), (2 * width,), (hidden,)]
        made = [torch.randn(NUM_EXPERTS, *size, generator=rng) for size in sizes]
        if not gpt_oss:
            made = made[:2]
        self.row_of = torch.tensor([2, 0, 3], dtype=torch.int32)
        self.rows = torch.zeros(NUM_EXPERTS + 1, self.shape.row_bytes, dtype=torch.uint8)
        self.rows[self.row_of.long()] = self.shape.pack(*made)
        if "gate_up_proj.outer" in (views := self.shape.layout.views(self.rows)):
            views["gate_up_proj.outer"][:, 1] *= 3  # gate and up have their own
        self.x = (torch.randn(NUM_TOKENS, hidden, generator=rng) / hidden**0.5).to(dtype)
        scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=rng)
        self.weights, self.ids = scores.topk(TOP_K, dim=1)
        for name in ("row_of", "rows", "x", "weights", "ids"):
            setattr(self, name, getattr(self, name).to(device))

    def expected(self) -> Tensor:
        """[T, H] in float64."""
        total = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        for token, rank in product(range(NUM_TOKENS), range(TOP_K)):
            row = self.rows[self.row_of[self.ids[token, rank]]]
            gate_up = self.shape.gate_up(row, torch.float64) @ self.x[token].double()
            act = self.activation.definition(*self.shape.gate_and_up(gate_up, row))
            y = self.shape.with_bias(self.shape.down(row, torch.float64) @ act, row)
            total[token] += self.weights[token, rank] * y
        return total

    def decoded(self, config: DecodeConfig | None) -> Tensor:
        routed = (self.ids, self.weights, self.row_of, self.rows, self.shape, self.activation)
        act = decode_experts.launch_gate_up(self.x, *routed, config)
        return decode_experts.launch_down(act, self.rows, self.shape, config=config)

    def grouped(self, tiles: ChunkTiles | None) -> Tensor:
        pairs = grouping.launch_group_pairs(self.ids, NUM_EXPERTS)
        act = self.x.new_full((self.ids.numel(), self.shape.width), float("nan"))
        y = self.x.new_full((self.ids.numel(), self.shape.hidden), float("nan"))
        experts = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=self.x.device)
        chunk = (self.row_of, self.rows, self.shape, self.activation)
        grouped_gemm.launch_run_group(self.x, pairs, experts, *chunk, act, y, tiles)
        return grouped_gemm.launch_combine(y, pairs, self.weights)


def assert_close(got: Tensor, want: Tensor, limit: float) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < limit, f"relative error {error:.2e}"


@triton.jit
def _tile_kernel(
    row_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, LOAD: tl.constexpr, OUTER: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The whole matrix [N, K] at the start of a row, tile by tile."""
    n = tl.arange(0, N)
    outer = tl.where(n < N // 2, OUTER(row_ptr, 0, 0, N, K), OUTER(row_ptr, 0, 1, N, K))
    for begin in range(0, K, BLOCK_K):
        tile = LOAD(row_ptr, 0, n, begin, N, K, None, BLOCK_K).to(tl.float32) * outer[:, None]
        k = begin + tl.arange(0, BLOCK_K)
        tl.store(out_ptr + n[:, None] * K + k[None, :], tile, mask=(k < K)[None, :])


SIZES = {"fp8_block": (200, 128), "nvfp4": (80, 48), "mxfp4": (96, 64)}


@pytest.mark.parametrize("name", FORMATS)
def test_both_forms_equal_the_dequantised_reference(name: str, device: torch.device) -> None:
    """Sizes that no tile divides; columns folded and not."""
    case = Case(FORMATS[name], *SIZES.get(name, (72, 40)), device)
    want = case.expected()
    for config in (DecodeConfig(32, 64, 4, 1), DecodeConfig(64, 256, 2, 3, 32)):
        assert_close(case.decoded(config), want, 1e-5)
    for tiles in (TINY_TILES, None):
        assert_close(case.grouped(tiles), want, 1e-5)


@pytest.mark.parametrize("name", ["bf16", "fp32", "mxfp4"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gpt_oss_experts(name: str, transposed: bool, device: torch.device) -> None:
    case = Case(FORMATS[name], 96, 64, device, gpt_oss=True, transposed=transposed)
    want = case.expected()
    assert_close(case.decoded(DecodeConfig(64, 32, 4, 1)), want, 1e-5)
    for tiles in (TINY_TILES, None):
        assert_close(case.grouped(tiles), want, 1e-5)


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4", "mxfp4"])
def test_half_precision_tokens(name: str, device: torch.device) -> None:
    """Products of fp16: bf16 is left to the device, see `test_experts`."""
    case = Case(FORMATS[name], *SIZES[name], device, dtype=torch.float16)
    want = case.expected()
    assert_close(case.decoded(DecodeConfig(32, 128, 4, 1, 16)), want, 2e-3)
    assert_close(case.grouped(None), want, 2e-3)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # 6 * 2^127 is past fp32
@pytest.mark.parametrize("block_k", [128, 512])
@pytest.mark.parametrize("name", ["fp8_block", "nvfp4", "mxfp4"])
def test_every_code_under_every_scale(name: str, block_k: int, device: torch.device) -> None:
    """Each byte of codes, and each byte of a scale that is a number; equal bit for bit."""
    n, k = 256, 4096 + 64
    shape = ExpertShape.of(k, n // 2, FORMATS[name], torch.float32)
    rows = torch.zeros(1, shape.row_bytes, dtype=torch.uint8)
    views = shape.layout.views(rows)
    codes, scale = (views[f"gate_up_proj{s}"][0] for s in ("", ".scale"))
    number = torch.arange(codes.numel()).view(codes.shape)
    codes.view(torch.uint8).copy_((number + number // codes.shape[1]) % 256)
    number = torch.arange(scale.numel()).view(scale.shape)
    if name == "fp8_block":
        codes.view(torch.uint8)[codes.isnan()] = 1
        scale.copy_((number + 1) * 2.0**-5)
    else:
        scale.view(torch.uint8).copy_((number + number // scale.shape[1]) % 256)
    if name == "nvfp4":
        scale.view(torch.uint8)[scale.isnan()] = 1
        views["gate_up_proj.outer"].copy_(torch.tensor([0.5, 3.0]))
    want = shape.gate_up(rows[0])
    got = torch.full((n, k), float("nan"), device=device)
    _tile_kernel[(1,)](rows.to(device), got, n, k, *shape.loads, BLOCK_K=block_k)
    assert torch.equal(got.isnan().cpu(), want.isnan())
    assert want.isnan().any() == (name == "mxfp4")
    assert torch.equal(got.cpu().nan_to_num(), want.nan_to_num())


def test_gates_equal_their_definitions(device: torch.device) -> None:
    for gate in (GELU_ERF, clamped_swiglu(1.702, 7.0)):
        case = Case(FORMATS["fp32"], 32, 16, device)
        case.activation = gate
        case.x *= 8  # past the limits of a clamped gate
        config = DecodeConfig(32, 32, 4, 1)
        assert_close(case.decoded(config), case.expected(), 1e-5)
