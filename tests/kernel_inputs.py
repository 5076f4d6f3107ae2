"""Random tensors and tolerances for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

# Triton's interpreter cuts off what does not fit bf16 instead of rounding it.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2 if torch.cuda.is_available() else 4e-2,
}
DTYPES = list(TOLERANCE)


class Random:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.kind = {"dtype": dtype, "device": device}
        self.rng = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.rng) * std).to(**self.kind)


def assert_close(got: Tensor, want: Tensor, limit: float | None = None) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (limit or TOLERANCE[got.dtype]), f"relative error {error:.2e}"
