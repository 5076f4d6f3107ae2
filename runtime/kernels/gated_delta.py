"""The gated delta rule of one token, in one kernel with the gated norm behind it.

A head's state [K, V], fp32, fades by exp(g), is corrected towards the new value at the new key by
beta, and read at the query (Yang et al., Gated Delta Networks, arXiv 2412.06464). Queries and keys
are brought to length one; each serves several value heads that follow one another.

Further legend: B sequences, S tokens of a sequence in this step, N value heads, K and V dims of a
key and a value head. `mixed` holds per token the query heads, then the key heads, then the value
heads, out of the convolution; `gates` is a projection's [.., z (N * V), b (N), a (N)].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_NORM_EPS = tl.constexpr(1e-6)  # of queries and keys, as transformers has it
_ROWS = 16


class DeltaHeads(NamedTuple):
    """Sizes and the small parameters of a layer's heads."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    log_decay_N: Tensor
    decay_bias_N: Tensor
    norm_V: Tensor
    eps: float
    silu: bool  # the output gate: silu, else sigmoid

    @property
    def group(self) -> int:
        return self.num_values // self.num_keys

    @property
    def width(self) -> int:
        """Of `mixed`."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim


class Terms(NamedTuple):
    """What the rule reads of a step, fp32: [B, S, N, dim] and [B, S, N]; queries are scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


def terms(mixed_BSC: Tensor, gates_BSG: Tensor, heads: DeltaHeads) -> Terms:
    sizes = [heads.num_keys * heads.key_dim] * 2 + [heads.num_values * heads.value_dim]
    q, k, v = (part.unflatten(-1, (n, -1)).float() for part, n in zip(
        mixed_BSC.split(sizes, -1), (heads.num_keys, heads.num_keys, heads.num_values), strict=True
    ))  # fmt: skip
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS.value)).repeat_interleave(
            heads.group, dim=2
        )
        for x in (q, k)
    )
    _, b, a = split_gates(gates_BSG, heads)
    rate = heads.log_decay_N.float().exp()
    log_decay = -rate * F.softplus(a.float() + heads.decay_bias_N.float())
    return Terms(q * heads.key_dim**-0.5, k, v, log_decay, b.sigmoid().float())


def split_gates(gates_BSG: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    n = heads.num_values
    z, b, a = gates_BSG.split([n * heads.value_dim, n, n], -1)
    return z, b, a


def gated_norm(x_BSNV: Tensor, gates_BSG: Tensor, heads: DeltaHeads) -> Tensor:
    """RMSNorm of each head, times its weight and the gate: [B, S, N * V]."""
    z = split_gates(gates_BSG, heads)[0].unflatten(-1, (heads.num_values, -1)).float()
    x = x_BSNV.float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + heads.eps)).to(x_BSNV.dtype)
    gate = F.silu(z) if heads.silu else torch.sigmoid(z)
    return ((heads.norm_V * x).float() * gate).to(x_BSNV.dtype).flatten(-2)


def delta_step(
    mixed_BSC: Tensor, gates_BSG: Tensor, state_BNKV: Tensor, heads: DeltaHeads
) -> Tensor:
    """[B, S, N * V]: token by token, norm and gate included; the state moves on by S tokens."""
    term = terms(mixed_BSC, gates_BSG, heads)
    out = torch.empty_like(term.v)
    for s in range(mixed_BSC.shape[1]):
        q, k, v, log_decay, beta = (x[:, s] for x in term)
        state_BNKV.mul_(log_decay.exp()[..., None, None])
        known = (state_BNKV * k[..., None]).sum(-2)
        state_BNKV.add_(k[..., None] * ((v - known) * beta[..., None])[..., None, :])
        out[:, s] = (state_BNKV * q[..., None]).sum(-2)
    return gated_norm(out.to(mixed_BSC.dtype), gates_BSG, heads)


@triton.jit
def head_rates(
    b: tl.tensor, a: tl.tensor, log_decay: tl.tensor, bias: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """log decay and beta of tokens, fp32; beta is rounded as the model's dtype does."""
    raised = a.to(tl.float32) + bias.to(tl.float32)
    soft = tl.where(raised > 20.0, raised, tl.log(1.0 + tl.exp(tl.minimum(raised, 20.0))))
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    return -tl.exp(log_decay.to(tl.float32)) * soft, beta


@triton.jit
def gate_and_norm(
    x: tl.tensor, z: tl.tensor, weight: tl.tensor, eps: tl.tensor, DIM: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows [R, DIM] as `gated_norm` makes them; x is in the model's dtype."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / DIM + eps)
    normed = (weight.to(tl.float32) * (wide * scale).to(x.dtype).to(tl.float32)).to(x.dtype)
    gate = 1.0 / (1.0 + tl.exp(-z.to(tl.float32)))
    if SILU:
        gate = gate * z.to(tl.float32)
    return (normed.to(tl.float32) * gate).to(x.dtype)


@triton.jit
def _step_kernel(
    mixed_ptr: tl.tensor, gates_ptr: tl.tensor, state_ptr: tl.tensor, log_decay_ptr: tl.tensor,
    bias_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor, gates_stride: tl.tensor,
    scale: tl.tensor, eps: tl.tensor, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, SILU: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    i = tl.arange(0, K)[:, None]
    j = tl.arange(0, V)[None, :]
    at_state = ((batch * NUM_VALUES + head) * K + i) * V + j
    state = tl.load(state_ptr + at_state)
    token = mixed_ptr + batch * (2 * NUM_KEYS * K + NUM_VALUES * V)
    q = tl.load(token + key_head * K + i).to(tl.float32)
    k = tl.load(token + (NUM_KEYS + key_head) * K + i).to(tl.float32)
    v = tl.load(token + 2 * NUM_KEYS * K + head * V + j).to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0, keep_dims=True) + _NORM_EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0, keep_dims=True) + _NORM_EPS)
    gates = gates_ptr + batch * gates_stride
    b = tl.load(gates + NUM_VALUES * V + head)
    a = tl.load(gates + NUM_VALUES * V + NUM_VALUES + head)
    log_decay, beta = head_rates(b, a, tl.load(log_decay_ptr + head), tl.load(bias_ptr + head))
    state = state * tl.exp(log_decay)
    known = tl.sum(state * k, axis=0, keep_dims=True)
    state += k * ((v - known) * beta)
    tl.store(state_ptr + at_state, state)
    out = tl.sum(state * q, axis=0, keep_dims=True).to(out_ptr.dtype.element_ty)
    z = tl.load(gates + head * V + j)
    out = gate_and_norm(out, z, tl.load(norm_ptr + j), eps, V, SILU)
    tl.store(out_ptr + (batch * NUM_VALUES + head) * V + j, out)


@triton.jit
def _gated_norm_kernel(
    x_ptr: tl.tensor, gates_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor,
    gates_stride: tl.tensor, eps: tl.tensor, num_rows: tl.tensor, NUM_VALUES: tl.constexpr,
    V: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, V)[None, :]
    there = row < num_rows
    x = tl.load(x_ptr + row * V + j, mask=there, other=0.0)
    token, head = row // NUM_VALUES, row % NUM_VALUES
    z = tl.load(gates_ptr + token * gates_stride + head * V + j, mask=there, other=0.0)
    out = gate_and_norm(x, z, tl.load(norm_ptr + j), eps, V, SILU)
    tl.store(out_ptr + row * V + j, out, mask=there)


def launch_delta_step(
    mixed_BSC: Tensor, gates_BSG: Tensor, state_BNKV: Tensor, heads: DeltaHeads
) -> Tensor:
    """Triton form of `delta_step` for one token; K and V powers of two.

    Contiguous, but for gates, which may be columns of a wider contiguous tensor.
    """
    batch, steps, _ = mixed_BSC.shape
    assert steps == 1, f"{steps} tokens, but a step has one"
    out = mixed_BSC.new_empty(batch, 1, heads.num_values * heads.value_dim)
    _step_kernel[(heads.num_values, batch)](
        mixed_BSC, gates_BSG, state_BNKV, heads.log_decay_N, heads.decay_bias_N, heads.norm_V,
        out, gates_BSG.stride(1), heads.key_dim**-0.5, heads.eps, NUM_KEYS=heads.num_keys,
        NUM_VALUES=heads.num_values, K=heads.key_dim, V=heads.value_dim, SILU=heads.silu,
        num_warps=8,
    )  # fmt: skip
    return out


def launch_gated_norm(x_BSNV: Tensor, gates_BSG: Tensor, heads: DeltaHeads) -> Tensor:
    """Triton form of `gated_norm`; x contiguous, gates as in `launch_delta_step`."""
    out = torch.empty_like(x_BSNV)
    num_rows = x_BSNV.numel() // heads.value_dim
    _gated_norm_kernel[(triton.cdiv(num_rows, _ROWS),)](
        x_BSNV, gates_BSG, heads.norm_V, out, gates_BSG.stride(1), heads.eps, num_rows,
        NUM_VALUES=heads.num_values, V=heads.value_dim, SILU=heads.silu, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return out.flatten(-2)
