"""The router's kernels against their definitions, ties included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residency.runtime.kernels import routing
from residency.runtime.kernels.dense import DenseConfig

# Triton's interpreter cuts off what does not fit bf16 instead of rounding it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if torch.cuda.is_available() else 4e-2}
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def _assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"


def _distinct_logits(num_tokens: int, num_experts: int) -> Tensor:
    rng = torch.Generator().manual_seed(num_tokens + num_experts)
    rows = [torch.randperm(num_experts, generator=rng) for _ in range(num_tokens)]
    return torch.stack(rows) / 16 - 1


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extents", [(1, 128, 8), (5, 6, 6), (9, 37, 3), (17, 8, 1)], ids=str)
def test_choice(
    extents: tuple[int, int, int], dtype: torch.dtype, renormalise: bool, device: torch.device
) -> None:
    num_tokens, num_experts, top_k = extents
    logits = _distinct_logits(num_tokens, num_experts).to(dtype).to(device)
    want = routing.choose_experts(logits, top_k, renormalise)
    got = routing.launch_choose_experts(logits, top_k, renormalise)
    assert got.ids_TK.dtype == torch.int64 and got.ids_TK.tolist() == want.ids_TK.tolist()
    _assert_close(got.weights_TK, want.weights_TK)


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5], device=device)
    ids = routing.launch_choose_experts(logits, 4, True).ids_TK
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
def test_ids_stay_in_range_whatever_the_logits(device: torch.device) -> None:
    bad = torch.full((1, 5), float("nan"), device=device)
    low = torch.tensor([[0.0, -1e4, -2e4, -3e4, -3e4]], device=device)
    for logits in (bad, -bad, low):
        ids = routing.launch_choose_experts(logits, 4, True).ids_TK[0].tolist()
        assert len(set(ids)) == 4 and set(ids) <= set(range(5))


@pytest.mark.parametrize("config", [None, DenseConfig(4, 4)], ids=["chosen", "e4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extents", [(1, 64, 16, 4), (3, 100, 9, 2), (8, 32, 6, 6)], ids=str)
def test_few_tokens(
    extents: tuple[int, int, int, int],
    dtype: torch.dtype,
    config: DenseConfig | None,
    device: torch.device,
) -> None:
    num_tokens, size, num_experts, top_k = extents
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(num_tokens, size, generator=rng).to(dtype).to(device)
    norm_weight = torch.randn(size, generator=rng).to(dtype).to(device)
    gate = torch.randn(num_experts, size, generator=rng).to(dtype).to(device) / 8
    arrivals = torch.zeros(1, dtype=torch.int32, device=device)
    args = (x, norm_weight, EPS, gate, top_k, True, arrivals)
    want = routing.route_few(*args)
    for _ in range(2):
        got = routing.launch_route_few(*args, config)
        _assert_close(got.x_TH, want.x_TH)
        assert arrivals.tolist() == [0]
        assert got.ids_TK.tolist() == want.ids_TK.tolist()
        _assert_close(got.weights_TK, want.weights_TK)
    for token in range(num_tokens):
        alone = routing.launch_route_few(x[token : token + 1], *args[1:], config)
        assert all(torch.equal(a[0], b[token]) for a, b in zip(alone, got, strict=True))
