"""The router: which experts a token goes to, and with what weights.

For few tokens one kernel does it all: every program makes a few logits, and the one that arrives
last chooses. Logits are rounded to the model's dtype before the softmax, as the model does.
Equal probabilities go to the lower expert id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from residency.runtime.kernels.dense import (
    FEW,
    DenseConfig,
    launch_options,
    normalise,
    rms_norm,
    wait_for_inputs,
)

ROUTER_CONFIGS = [
    DenseConfig(2, 4),
    DenseConfig(1, 4),
    DenseConfig(4, 4),
    DenseConfig(1, 8),
    DenseConfig(2, 2),
]
_ROWS_PER_PROGRAM = 4


class Routes(NamedTuple):
    """Experts of each token by falling weight; distinct within a token."""

    ids_TK: Tensor  # int64
    weights_TK: Tensor  # the logits' dtype


class Routed(NamedTuple):
    """What the experts get: their input, ids and weights."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


def choose_experts(logits_TE: Tensor, top_k: int, renormalise: bool) -> Routes:
    """Softmax in fp32 over the experts, the top_k of them, weights summing to 1 if asked."""
    weights, ids = logits_TE.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(ids, weights.to(logits_TE.dtype))


def route_few(
    x_TH: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    gate_EH: Tensor,
    top_k: int,
    renormalise: bool,
    arrivals: Tensor,
) -> Routed:
    """The norm of x, and the routes of the normed tokens through the router's weight [E, H].

    arrivals: int32 [1], zero before and after; no two launches may use it at once.
    """
    assert arrivals.numel() == 1, f"arrivals has {arrivals.numel()} elements"
    normed_TH = rms_norm(x_TH, norm_weight_H, eps)
    logits_TE = F.linear(normed_TH, gate_EH)
    return Routed(normed_TH, *choose_experts(logits_TE, top_k, renormalise))


@triton.jit
def _choose(
    logits: tl.tensor, token: tl.tensor, inside_token: tl.tensor, ids_ptr: tl.tensor,
    weights_ptr: tl.tensor, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, RENORMALISE: tl.constexpr,
) -> None:  # fmt: skip
    """Routes of the tokens [R, 1] with the fp32 logits [R, EXPERTS_PAD], -inf past the end."""
    e = tl.arange(0, EXPERTS_PAD)[None, :]
    likely = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
    likely = likely / tl.sum(likely, axis=1, keep_dims=True)
    # Probabilities are not negative, so their bits order as they do; the low half breaks ties.
    bits = (likely.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    key = tl.where(e < NUM_EXPERTS, (bits << 32) + (EXPERTS_PAD - 1 - e), -1)
    k = tl.arange(0, K_PAD)[None, :]
    best = tl.zeros((logits.shape[0], K_PAD), tl.int64)
    for rank in tl.static_range(TOP_K):
        top = tl.max(key, axis=1, keep_dims=True)
        best = tl.where(k == rank, top, best)
        key = tl.where(key == top, -1, key)
    weight = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    weight = tl.where(k < TOP_K, weight, 0.0)
    if RENORMALISE:
        weight = weight / tl.sum(weight, axis=1, keep_dims=True)
    at = token * TOP_K + k
    mask = inside_token & (k < TOP_K)
    tl.store(ids_ptr + at, EXPERTS_PAD - 1 - (best & 0x7FFFFFFF), mask=mask)
    tl.store(weights_ptr + at, weight, mask=mask)


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, num_tokens: tl.tensor,
    ROWS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, RENORMALISE: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, EXPERTS_PAD)[None, :]
    mask = (token < num_tokens) & (e < NUM_EXPERTS)
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + e, mask=mask, other=0.0).to(tl.float32)
    logits = tl.where(e < NUM_EXPERTS, logits, float("-inf"))
    _choose(
        logits, token, token < num_tokens, ids_ptr, weights_ptr,
        NUM_EXPERTS, EXPERTS_PAD, TOP_K, K_PAD, RENORMALISE,
    )  # fmt: skip


@triton.jit
def _route_few_kernel(
    x_ptr: tl.tensor, norm_weight_ptr: tl.tensor, gate_ptr: tl.tensor, normed_ptr: tl.tensor,
    logits_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, arrivals_ptr: tl.tensor,
    eps: tl.tensor, TOKENS: tl.constexpr, TOKENS_PAD: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr, BLOCK_E: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    RENORMALISE: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    mine = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    c = tl.arange(0, SIZE_PAD)[None, :]
    inside = c < SIZE
    kept = mine < NUM_EXPERTS
    gate_mask = kept[:, None] & inside
    gate = tl.load(gate_ptr + mine[:, None] * SIZE + c, mask=gate_mask, other=0.0)
    norm_weight = tl.load(norm_weight_ptr + c, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    for t in tl.static_range(TOKENS):
        x = tl.load(x_ptr + t * SIZE + c, mask=inside, other=0.0)
        x = normalise(x, norm_weight, eps, SIZE)
        if tl.program_id(0) == 0:
            tl.store(normed_ptr + t * SIZE + c, x, mask=inside)
        logit = tl.sum(gate.to(tl.float32) * x.to(tl.float32), axis=1)
        tl.store(logits_ptr + t * NUM_EXPERTS + mine, logit, mask=kept)

    # All threads' logits are written before the program arrives; who comes last sees them all.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr, 0)
        token = tl.arange(0, TOKENS_PAD)[:, None]
        e = tl.arange(0, EXPERTS_PAD)[None, :]
        at = logits_ptr + token * NUM_EXPERTS + e
        mask = (token < TOKENS) & (e < NUM_EXPERTS)
        logits = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        logits = tl.where(e < NUM_EXPERTS, logits, float("-inf"))
        _choose(
            logits, token, token < TOKENS, ids_ptr, weights_ptr,
            NUM_EXPERTS, EXPERTS_PAD, TOP_K, K_PAD, RENORMALISE,
        )  # fmt: skip


def launch_choose_experts(logits_TE: Tensor, top_k: int, renormalise: bool) -> Routes:
    """Triton form of `choose_experts`; contiguous logits."""
    num_tokens, num_experts = logits_TE.shape
    out = _empty_routes(logits_TE, num_tokens, top_k)
    _choose_kernel[(triton.cdiv(num_tokens, _ROWS_PER_PROGRAM),)](
        logits_TE, *out, num_tokens,
        ROWS=_ROWS_PER_PROGRAM, **_extents(num_experts, top_k), RENORMALISE=renormalise,
        num_warps=4,
    )  # fmt: skip
    return out


def launch_route_few(
    x_TH: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    gate_EH: Tensor,
    top_k: int,
    renormalise: bool,
    arrivals: Tensor,
    config: DenseConfig | None = None,
) -> Routed:
    """Triton form of `route_few`; at most FEW tokens, all tensors contiguous."""
    num_tokens, size = x_TH.shape
    assert num_tokens <= FEW, f"{num_tokens} tokens, but at most {FEW} are few"
    num_experts = gate_EH.shape[0]
    cfg = config or ROUTER_CONFIGS[0]
    normed_TH = torch.empty_like(x_TH)
    logits_TE = x_TH.new_empty(num_tokens, num_experts)
    out = _empty_routes(x_TH, num_tokens, top_k)
    _route_few_kernel[(triton.cdiv(num_experts, cfg.block_n),)](
        x_TH, norm_weight_H, gate_EH, normed_TH, logits_TE, *out, arrivals, eps,
        TOKENS=num_tokens, TOKENS_PAD=triton.next_power_of_2(num_tokens),
        SIZE=size, SIZE_PAD=triton.next_power_of_2(size), BLOCK_E=cfg.block_n,
        **_extents(num_experts, top_k), RENORMALISE=renormalise, EARLY=cfg.early,
        num_warps=cfg.num_warps, **launch_options(cfg.early),
    )  # fmt: skip
    return Routed(normed_TH, *out)


def _empty_routes(like: Tensor, num_tokens: int, top_k: int) -> Routes:
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=like.device)
    return Routes(ids_TK, like.new_empty(num_tokens, top_k))


def _extents(num_experts: int, top_k: int) -> dict[str, int]:
    return {
        "NUM_EXPERTS": num_experts,
        "EXPERTS_PAD": triton.next_power_of_2(num_experts),
        "TOP_K": top_k,
        "K_PAD": triton.next_power_of_2(top_k),
    }
