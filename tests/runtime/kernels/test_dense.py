"""Norms and few-row products against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residency.runtime.kernels import dense
from residency.runtime.kernels.dense import DenseConfig

# Triton's interpreter cuts off what does not fit bf16 instead of rounding it.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2 if torch.cuda.is_available() else 4e-2,
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def _random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=rng).to(dtype).to(device)


def _assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extents", [(1, 64), (5, 100), (3, 2, 33)], ids=str)
def test_norms(extents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = _random(*extents, dtype=dtype, device=device) * 3
    residual = _random(*extents, dtype=dtype, device=device, seed=1)
    weight = _random(extents[-1], dtype=dtype, device=device)
    _assert_close(dense.launch_rms_norm(x, weight, EPS), dense.rms_norm(x, weight, EPS))
    got = dense.launch_add_rms_norm(x, residual, weight, EPS)
    want = dense.add_rms_norm(x, residual, weight, EPS)
    _assert_close(got.total_RH, want.total_RH)
    _assert_close(got.normed_RH, want.normed_RH)


@pytest.mark.parametrize("config", [None, DenseConfig(4, 4)], ids=["chosen", "n4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extents", [(1, 64, 9), (3, 100, 33), (8, 128, 16)], ids=str)
def test_few_rows(
    extents: tuple[int, int, int],
    dtype: torch.dtype,
    config: DenseConfig | None,
    device: torch.device,
) -> None:
    num_rows, size, num_outputs = extents
    x = _random(num_rows, size, dtype=dtype, device=device)
    norm_weight = _random(size, dtype=dtype, device=device)
    weight = _random(num_outputs, size, dtype=dtype, device=device) / size**0.5
    residual = _random(num_rows, num_outputs, dtype=dtype, device=device)
    for added in (None, residual):
        args = (x, weight, added)
        _assert_close(dense.launch_linear_few(*args, config), dense.linear_few(*args))
    args = (x, norm_weight, EPS, weight)
    _assert_close(dense.launch_norm_linear_few(*args, config), dense.norm_linear_few(*args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype, device: torch.device) -> None:
    x = _random(6, 96, dtype=dtype, device=device)
    norm_weight = _random(96, dtype=dtype, device=device)
    weight = _random(20, 96, dtype=dtype, device=device)
    together = dense.launch_norm_linear_few(x, norm_weight, EPS, weight)
    for row in range(6):
        alone = dense.launch_norm_linear_few(x[row : row + 1], norm_weight, EPS, weight)
        assert torch.equal(alone[0], together[row])


def test_many_rows_are_refused(device: torch.device) -> None:
    x = _random(dense.FEW + 1, 32, dtype=torch.float32, device=device)
    with pytest.raises(AssertionError, match="9 rows, but at most 8 are few"):
        dense.launch_linear_few(x, x)
