"""The gated delta rule over a chunk of tokens, in two kernels and the gated norm.

Tokens are cut into blocks of 64. Within a block the corrections solve a unit lower triangular
system, the same for all columns of a value, so its inverse T is built once (forward substitution,
row by row) and gives what each token writes were the state empty (`u`) and what it must take off
for the state at the block's begin (`w`). The second kernel goes through a head's blocks in order.
Sums in fp32, like the state.

Legend as in `gated_delta`; T tokens of a block, P blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.gated_delta import (
    _NORM_EPS,
    DeltaHeads,
    gated_norm,
    head_rates,
    launch_gated_norm,
    terms,
)

BLOCK = 64  # tokens
SPAN = 2048  # tokens whose working memory is held at once: 0.1 GB of 48 heads of 128
_BLOCK_V = 32


class Blocks(NamedTuple):
    """Of each head and block, fp32: [B, N, P, T, dim], attention [B, N, P, T, T], decay summed."""

    u: Tensor
    w: Tensor
    attention: Tensor
    summed: Tensor

    @classmethod
    def empty(cls, batch: int, steps: int, heads: DeltaHeads, device: torch.device) -> Blocks:
        extent = batch, heads.num_values, triton.cdiv(steps, BLOCK), BLOCK
        return cls(
            torch.empty(*extent, heads.value_dim, device=device),
            torch.empty(*extent, heads.key_dim, device=device),
            torch.empty(*extent, BLOCK, device=device),
            torch.empty(extent, device=device),
        )


def delta_chunk(
    mixed_BSC: Tensor, gates_BSG: Tensor, state_BNKV: Tensor, heads: DeltaHeads
) -> Tensor:
    """As `delta_step` in blocks, for any number of tokens; equal to it but for rounding."""
    steps = mixed_BSC.shape[1]
    pad = -steps % BLOCK
    q, k, v, log_decay, beta = (
        torch.nn.functional.pad(x.movedim(2, 1), (0, 0) * (x.ndim - 3) + (0, pad)).unflatten(
            2, (-1, BLOCK)
        )
        for x in terms(mixed_BSC, gates_BSG, heads)
    )
    summed = log_decay.cumsum(-1)
    faded = (summed[..., :, None] - summed[..., None, :]).tril().exp().tril()
    system = (k * beta[..., None]) @ k.mT * faded
    attention = q @ k.mT * faded
    right = torch.cat([v, k * summed.exp()[..., None]], -1) * beta[..., None]
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [heads.value_dim, heads.key_dim], -1
    )
    out = torch.empty_like(v)
    for p in range(v.shape[2]):
        written = u[:, :, p] - w[:, :, p] @ state_BNKV
        read = (q[:, :, p] * summed[:, :, p].exp()[..., None]) @ state_BNKV
        out[:, :, p] = read + attention[:, :, p] @ written
        last = summed[:, :, p, -1:]
        keys = k[:, :, p] * (last - summed[:, :, p]).exp()[..., None]
        state_BNKV.mul_(last.exp()[..., None]).add_(keys.mT @ written)
    out = out.flatten(2, 3)[:, :, :steps].transpose(1, 2)
    return gated_norm(out.to(mixed_BSC.dtype), gates_BSG, heads)


@triton.jit
def _unit_rows(x: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) + _NORM_EPS)


@triton.jit
def _solve_kernel(
    mixed_ptr: tl.tensor, gates_ptr: tl.tensor, log_decay_ptr: tl.tensor, bias_ptr: tl.tensor,
    u_ptr: tl.tensor, w_ptr: tl.tensor, attention_ptr: tl.tensor, summed_ptr: tl.tensor,
    first: tl.tensor, num_steps: tl.tensor, all_steps: tl.tensor, gates_stride: tl.tensor,
    scale: tl.tensor, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    t = tl.arange(0, T)
    step = block * T + t
    there = step < num_steps
    i = tl.arange(0, K)[None, :]
    j = tl.arange(0, V)[None, :]
    token = batch * all_steps + first + step
    row = mixed_ptr + token[:, None] * (2 * NUM_KEYS * K + NUM_VALUES * V)
    real = there[:, None]
    q = _unit_rows(tl.load(row + key_head * K + i, mask=real, other=0.0)) * scale
    k = _unit_rows(tl.load(row + (NUM_KEYS + key_head) * K + i, mask=real, other=0.0))
    v = tl.load(row + 2 * NUM_KEYS * K + head * V + j, mask=real, other=0.0).to(tl.float32)
    gates = gates_ptr + token * gates_stride + NUM_VALUES * V
    b = tl.load(gates + head, mask=there, other=0.0)
    a = tl.load(gates + NUM_VALUES + head, mask=there, other=0.0)
    log_decay, beta = head_rates(b, a, tl.load(log_decay_ptr + head), tl.load(bias_ptr + head))
    summed = tl.cumsum(tl.where(there, log_decay, 0.0), axis=0)
    beta = tl.where(there, beta, 0.0)[:, None]

    below = t[:, None] >= t[None, :]
    faded = tl.where(below, summed[:, None] - summed[None, :], 0.0)
    faded = tl.where(below, tl.exp(faded), 0.0)
    attention = tl.dot(q, tl.trans(k), input_precision=PRECISION) * faded
    system = tl.dot(k * beta, tl.trans(k), input_precision=PRECISION) * faded
    # (1 + A)^-1 - 1, row by row: row r is -A[r] - A[r] times the rows above it.
    inverse = tl.where(t[:, None] > t[None, :], -system, 0.0)
    for r in range(1, T):
        mine = tl.sum(tl.where(t[:, None] == r, inverse, 0.0), axis=0)
        more = tl.sum(mine[:, None] * inverse, axis=0)
        inverse = tl.where(t[:, None] == r, (mine + more)[None, :], inverse)
    inverse += tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    u = tl.dot(inverse, v * beta, input_precision=PRECISION)
    w = tl.dot(inverse, k * (beta * tl.exp(summed)[:, None]), input_precision=PRECISION)

    place = (batch * NUM_VALUES + head) * tl.num_programs(0) + block
    rows = place * T + t
    tl.store(u_ptr + rows[:, None] * V + j, u)
    tl.store(w_ptr + rows[:, None] * K + i, w)
    tl.store(attention_ptr + rows[:, None] * T + t[None, :], attention)
    tl.store(summed_ptr + rows, summed)


@triton.jit
def _scan_kernel(
    mixed_ptr: tl.tensor, u_ptr: tl.tensor, w_ptr: tl.tensor, attention_ptr: tl.tensor,
    summed_ptr: tl.tensor, state_ptr: tl.tensor, out_ptr: tl.tensor, first: tl.tensor,
    num_steps: tl.tensor, all_steps: tl.tensor, num_blocks: tl.tensor, scale: tl.tensor,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    T: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    t = tl.arange(0, T)
    i = tl.arange(0, K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    group = batch * NUM_VALUES + head
    at_state = (group * K + i[:, None]) * V + j
    state = tl.load(state_ptr + at_state)
    for block in range(num_blocks):
        step = block * T + t
        there = (step < num_steps)[:, None]
        token = batch * all_steps + first + step
        row = mixed_ptr + token[:, None] * (2 * NUM_KEYS * K + NUM_VALUES * V)
        q = _unit_rows(tl.load(row + key_head * K + i[None, :], mask=there, other=0.0)) * scale
        at_key = row + (NUM_KEYS + key_head) * K + i[None, :]
        k = _unit_rows(tl.load(at_key, mask=there, other=0.0))
        rows = (group * num_blocks + block) * T + t
        u = tl.load(u_ptr + rows[:, None] * V + j)
        w = tl.load(w_ptr + rows[:, None] * K + i[None, :])
        attention = tl.load(attention_ptr + rows[:, None] * T + t[None, :])
        summed = tl.load(summed_ptr + rows)
        last = tl.load(summed_ptr + (group * num_blocks + block) * T + T - 1)
        written = u - tl.dot(w, state, input_precision=PRECISION)
        out = tl.dot(q * tl.exp(summed)[:, None], state, input_precision=PRECISION)
        out += tl.dot(attention, written, input_precision=PRECISION)
        keys = k * tl.exp(last - summed)[:, None]
        state = state * tl.exp(last)
        state += tl.dot(tl.trans(keys), written, input_precision=PRECISION)
        at_out = (token[:, None] * NUM_VALUES + head) * V + j
        tl.store(out_ptr + at_out, out, mask=there)
    tl.store(state_ptr + at_state, state)


def launch_delta_chunk(
    mixed_BSC: Tensor, gates_BSG: Tensor, state_BNKV: Tensor, heads: DeltaHeads
) -> Tensor:
    """Triton form of `delta_chunk`, as many launches whatever the length up to SPAN tokens.

    K and V powers of two from 16 on. Contiguous, but for gates, see `launch_delta_step`.
    """
    batch, steps, _ = mixed_BSC.shape
    out = mixed_BSC.new_empty(batch, steps, heads.num_values, heads.value_dim)
    work = Blocks.empty(batch, min(steps, SPAN), heads, mixed_BSC.device)
    block_v = min(_BLOCK_V, heads.value_dim)
    # Products of tensor cores: near fp32, or finer than the 16 bits that go in and out.
    precision = "tf32x3" if mixed_BSC.dtype == torch.float32 else "tf32"
    sizes = {
        "NUM_KEYS": heads.num_keys, "NUM_VALUES": heads.num_values, "K": heads.key_dim,
        "V": heads.value_dim, "T": BLOCK, "PRECISION": precision, "num_warps": 8, "num_stages": 1,
    }  # fmt: skip
    scale = heads.key_dim**-0.5
    for first in range(0, steps, SPAN):
        span = min(SPAN, steps - first)
        blocks = triton.cdiv(span, BLOCK)
        _solve_kernel[(blocks, heads.num_values, batch)](
            mixed_BSC, gates_BSG, heads.log_decay_N, heads.decay_bias_N, *work, first, span,
            steps, gates_BSG.stride(1), scale, **sizes,
        )  # fmt: skip
        _scan_kernel[(heads.value_dim // block_v, heads.num_values, batch)](
            mixed_BSC, *work, state_BNKV, out, first, span, steps, blocks, scale, **sizes,
            BLOCK_V=block_v,
        )  # fmt: skip
    return launch_gated_norm(out, gates_BSG, heads)
