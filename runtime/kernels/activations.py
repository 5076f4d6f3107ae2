"""Gated activations of an expert: a jitted function of two fp32 tiles beside its definition.

All routed experts of the architectures here gate by SiLU, but those of gpt-oss (clamped SwiGLU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


class Activation(NamedTuple):
    """`kernel(gate, up, ALPHA, LIMIT)` is jitted, `form(gate, up, alpha, limit)` takes tensors.

    Both yield fp32 of fp32. alpha, limit: constants of the gate, where it has them.
    """

    kernel: Any
    form: Callable[[Tensor, Tensor, float, float], Tensor]
    alpha: float = 0.0
    limit: float = 0.0

    def definition(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.form(gate, up, self.alpha, self.limit)


@triton.jit
def _silu_kernel(
    gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gelu_tanh_kernel(
    gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    # 1 + tanh(z) = 2 - 2 / (exp(2 z) + 1), which stays finite where exp overflows.
    return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up


@triton.jit
def _gelu_erf_kernel(
    gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up


@triton.jit
def _clamped_swiglu_kernel(
    gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)


def _silu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return F.silu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _gelu_erf(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return F.gelu(gate) * up


def _clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (gate * alpha).sigmoid() * (up + 1)


SILU = Activation(_silu_kernel, _silu)
GELU_TANH = Activation(_gelu_tanh_kernel, _gelu_tanh)
GELU_ERF = Activation(_gelu_erf_kernel, _gelu_erf)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Of gpt-oss: gate x sigmoid(alpha gate) x (up + 1), the gate below limit, up within it."""
    return Activation(_clamped_swiglu_kernel, _clamped_swiglu, alpha, limit)
