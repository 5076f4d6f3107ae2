"""Norms, and products of a few rows with a weight matrix, bound by the bytes of the weights.

A program of a matrix product holds BLOCK_N whole rows of the weight in registers: their loads do
not wait for anything, and the norm of the input is recomputed behind them. Tokens are worked off
one by one, so a token's bits do not depend on its company.

Further legend: R rows (tokens of all sequences), N outputs, C inputs of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW = 8  # rows up to which the products here beat a matrix multiplication


class Normed(NamedTuple):
    """A sum and its norm, both [R, H] in the inputs' dtype."""

    total_RH: Tensor
    normed_RH: Tensor


class DenseConfig(NamedTuple):
    """Rows of the weight in one program; `early` starts a launch before the previous one ends.

    With `early` the weights load while the previous kernel of the stream still runs (Hopper's
    programmatic dependent launch); whatever that kernel may write is read after waiting for it.
    """

    block_n: int
    num_warps: int
    early: bool = False


DENSE_CONFIGS = [
    DenseConfig(4, 4),
    DenseConfig(2, 4),
    DenseConfig(8, 8),
    DenseConfig(4, 8),
    DenseConfig(8, 4),
    DenseConfig(1, 2),
    DenseConfig(2, 2),
]


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm as Qwen defines it, [R, H]: fp32 statistics, rounded before the weight."""
    x = x_RH.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight_H * (x * scale).to(x_RH.dtype)


def add_rms_norm(x_RH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float) -> Normed:
    """The sum x + residual, and its RMSNorm."""
    total_RH = x_RH + residual_RH
    return Normed(total_RH, rms_norm(total_RH, weight_H, eps))


def linear_few(x_RC: Tensor, weight_NC: Tensor, residual_RN: Tensor | None = None) -> Tensor:
    """x @ weight^T (+ residual), [R, N], one rounding."""
    y_RN = F.linear(x_RC.float(), weight_NC.float())
    if residual_RN is not None:
        y_RN = y_RN + residual_RN.float()
    return y_RN.to(x_RC.dtype)


def norm_linear_few(x_RC: Tensor, norm_weight_C: Tensor, eps: float, weight_NC: Tensor) -> Tensor:
    """rms_norm(x) @ weight^T, [R, N]."""
    return linear_few(rms_norm(x_RC, norm_weight_C, eps), weight_NC)


@triton.jit
def normalise(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """RMSNorm along axis 1 of a tile [R, SIZE padded with zeros], rounded as `rms_norm` does."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)
    rounded = (wide * scale).to(x.dtype).to(tl.float32)
    return (weight.to(tl.float32) * rounded).to(x.dtype)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Behind this the previous kernel's results are there, and the next kernel may start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, weight_ptr: tl.tensor, total_ptr: tl.tensor,
    normed_ptr: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
) -> None:  # fmt: skip
    c = tl.arange(0, SIZE_PAD)[None, :]
    inside = c < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + c
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + at, x, mask=inside)
    tl.store(normed_ptr + at, normalise(x, weight, eps, SIZE), mask=inside)


@triton.jit
def _linear_few_kernel(
    x_ptr: tl.tensor, norm_weight_ptr: tl.tensor, weight_ptr: tl.tensor, residual_ptr: tl.tensor,
    y_ptr: tl.tensor, num_outputs: tl.tensor, eps: tl.tensor, ROWS: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, SIZE_PAD)[None, :]
    inside = c < SIZE
    at = n.to(tl.int64)[:, None] * SIZE + c
    kept = n < num_outputs
    tile = tl.load(weight_ptr + at, mask=kept[:, None] & inside, other=0.0)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + c, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * SIZE + c, mask=inside, other=0.0)
        if norm_weight_ptr is not None:
            x = normalise(x, norm_weight, eps, SIZE)
        y = tl.sum(tile.to(tl.float32) * x.to(tl.float32), axis=1)
        if residual_ptr is not None:
            y += tl.load(residual_ptr + row * num_outputs + n, mask=kept, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * num_outputs + n, y, mask=kept)


def launch_rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Triton form of `rms_norm`; x of any leading shape, contiguous."""
    normed_RH = torch.empty_like(x_RH)
    _norm_rows(x_RH, None, weight_H, None, normed_RH, eps)
    return normed_RH


def launch_add_rms_norm(x_RH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float) -> Normed:
    """Triton form of `add_rms_norm`; inputs of any equal leading shape, contiguous."""
    out = Normed(torch.empty_like(x_RH), torch.empty_like(x_RH))
    _norm_rows(x_RH, residual_RH, weight_H, out.total_RH, out.normed_RH, eps)
    return out


def _norm_rows(
    x_RH: Tensor,
    residual_RH: Tensor | None,
    weight_H: Tensor,
    total_RH: Tensor | None,
    normed_RH: Tensor,
    eps: float,
) -> None:
    size = x_RH.shape[-1]
    pad = triton.next_power_of_2(size)
    _rms_norm_kernel[(x_RH.numel() // size,)](
        x_RH, residual_RH, weight_H, total_RH, normed_RH, eps,
        SIZE=size, SIZE_PAD=pad, num_warps=4 if pad <= 4096 else 8,
    )  # fmt: skip


def launch_linear_few(
    x_RC: Tensor,
    weight_NC: Tensor,
    residual_RN: Tensor | None = None,
    config: DenseConfig | None = None,
) -> Tensor:
    """Triton form of `linear_few`; at most FEW rows, all tensors contiguous."""
    return _launch_few(x_RC, None, 0.0, weight_NC, residual_RN, config)


def launch_norm_linear_few(
    x_RC: Tensor,
    norm_weight_C: Tensor,
    eps: float,
    weight_NC: Tensor,
    config: DenseConfig | None = None,
) -> Tensor:
    """Triton form of `norm_linear_few`; at most FEW rows, all tensors contiguous."""
    return _launch_few(x_RC, norm_weight_C, eps, weight_NC, None, config)


def _launch_few(
    x_RC: Tensor,
    norm_weight_C: Tensor | None,
    eps: float,
    weight_NC: Tensor,
    residual_RN: Tensor | None,
    config: DenseConfig | None,
) -> Tensor:
    num_rows, size = x_RC.shape
    num_outputs = weight_NC.shape[0]
    assert num_rows <= FEW, f"{num_rows} rows, but at most {FEW} are few"
    cfg = config or choose_dense(size)
    y_RN = x_RC.new_empty(num_rows, num_outputs)
    _linear_few_kernel[(triton.cdiv(num_outputs, cfg.block_n),)](
        x_RC, norm_weight_C, weight_NC, residual_RN, y_RN, num_outputs, eps,
        ROWS=num_rows, SIZE=size, SIZE_PAD=triton.next_power_of_2(size), BLOCK_N=cfg.block_n,
        EARLY=cfg.early, num_warps=cfg.num_warps, **launch_options(cfg.early),
    )  # fmt: skip
    return y_RN


def launch_options(early: bool) -> dict[str, bool]:
    """Launch options beside num_warps; the interpreter and other devices know none of them."""
    return {"launch_pdl": True} if early else {}


def choose_dense(size: int) -> DenseConfig:
    """By the row's length alone: about 64 elements a thread, whatever the number of tokens."""
    pad: int = triton.next_power_of_2(size)
    return DenseConfig(max(1, 8192 // pad), 4 if pad <= 8192 else 8)
