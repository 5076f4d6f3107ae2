"""Gated activations of an expert: a jitted function of two fp32 tiles beside its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


class Activation(NamedTuple):
    """`kernel(gate, up)` is jitted, `definition(gate, up)` takes tensors; both yield fp32."""

    kernel: Any
    definition: Callable[[Tensor, Tensor], Tensor]


@triton.jit
def _silu_kernel(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gelu_tanh_kernel(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    # 1 + tanh(z) = 2 - 2 / (exp(2 z) + 1), which stays finite where exp overflows.
    return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


SILU = Activation(_silu_kernel, _silu)
GELU_TANH = Activation(_gelu_tanh_kernel, _gelu_tanh)
