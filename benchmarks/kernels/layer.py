"""A decoder layer of random weights, and its kernels held against their definitions.

The definitions get the same numbers in fp64, so that they round nothing to bf16 on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from timing import Bench
from torch import Tensor

from residency.runtime.kernels.attention import AttendConfig, attend_one, launch_attend_one
from residency.runtime.kernels.dense import (
    DenseConfig,
    add_rms_norm,
    launch_add_rms_norm,
    launch_linear_few,
    launch_norm_linear_few,
    launch_rms_norm,
    linear_few,
    norm_linear_few,
    rms_norm,
)
from residency.runtime.kernels.rotary import (
    HeadNorms,
    KeyValues,
    launch_rotate_and_store,
    rotate_and_store,
)
from residency.runtime.kernels.routing import (
    choose_experts,
    launch_choose_experts,
    launch_route_few,
)

EPS = 1e-6
ROPE_BASE = 1e6
MAX_REGRET = 2e-3  # probability that rounded logits may cost a token's routes


class Sizes(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    experts: int
    top_k: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def attended(self) -> int:
        return self.heads * self.dim

    @property
    def weights(self) -> int:
        """Elements of the layer's matrices."""
        return self.hidden * (self.qkv + self.attended + self.experts)

    @property
    def cached(self) -> int:
        """Elements of one token's keys and values."""
        return 2 * self.kv_heads * self.dim


QWEN3_30B_A3B = Sizes(2048, 32, 4, 128, 128, 8)
TINY = Sizes(32, 4, 2, 16, 8, 2)


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    head_norms: HeadNorms
    cache: KeyValues
    out: Tensor
    router_norm: Tensor
    gate: Tensor


def made_up(bench: Bench, sizes: Sizes, batch: int, context: int) -> Layer:
    return Layer(
        bench.norm(sizes.hidden),
        bench.weight(sizes.qkv, sizes.hidden),
        head_norms(bench, sizes),
        cache(bench, sizes, batch, context),
        bench.weight(sizes.hidden, sizes.attended),
        bench.norm(sizes.hidden),
        bench.weight(sizes.experts, sizes.hidden),
    )


def head_norms(bench: Bench, sizes: Sizes) -> HeadNorms:
    return HeadNorms(bench.norm(sizes.dim), bench.norm(sizes.dim), EPS)


def cache(bench: Bench, sizes: Sizes, batch: int, context: int) -> KeyValues:
    extent = batch, sizes.kv_heads, context, sizes.dim
    return KeyValues(bench.normal(*extent), bench.normal(*extent))


def angles(bench: Bench, sizes: Sizes, begin: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, tokens, dim] from position `begin` on."""
    exponents = torch.arange(0, sizes.dim, 2, device=bench.device) / sizes.dim
    positions = torch.arange(begin, begin + tokens, device=bench.device)
    turns = torch.outer(positions.float(), ROPE_BASE**-exponents).repeat(1, 2)[None]
    return turns.cos().to(bench.dtype), turns.sin().to(bench.dtype)


def arrivals(bench: Bench) -> Tensor:
    """What the router's programs count in; zero is what it has to be."""
    return torch.zeros(1, dtype=torch.int32, device=bench.device)


def check_products(bench: Bench, sizes: Sizes, tokens: int, configs: Sequence[DenseConfig]) -> None:
    x, attended = bench.normal(tokens, sizes.hidden, std=2.0), bench.normal(tokens, sizes.attended)
    norm, qkv = bench.norm(sizes.hidden), bench.weight(sizes.qkv, sizes.hidden)
    out = bench.weight(sizes.hidden, sizes.attended)
    projected = norm_linear_few(x.double(), norm.double(), EPS, qkv.double())
    added = linear_few(attended.double(), out.double(), x.double())
    for config in configs:
        got = launch_norm_linear_few(x, norm, EPS, qkv, config)
        bench.check("norm and qkv", got, projected)
        bench.check("out", launch_linear_few(attended, out, x, config), added)


def check_router(bench: Bench, sizes: Sizes, tokens: int, configs: Sequence[DenseConfig]) -> None:
    """Routes must be among the best but for rounding; weights are those of the routes taken."""
    x, norm = bench.normal(tokens, sizes.hidden), bench.norm(sizes.hidden)
    gate, counter = bench.weight(sizes.experts, sizes.hidden), arrivals(bench)
    normed = rms_norm(x.double(), norm.double(), EPS)
    likely = (normed @ gate.double().T).softmax(-1)
    for config in configs:
        got = launch_route_few(x, norm, EPS, gate, sizes.top_k, True, counter, config)
        bench.check("router's norm", got.x_TH, normed)
        taken = likely.gather(1, got.ids_TK)
        regret = likely.topk(sizes.top_k).values.sum(1) - taken.sum(1)
        assert float(regret.max()) < MAX_REGRET, f"routes lose {float(regret.max()):.1e}"
        assert all(len(set(ids)) == sizes.top_k for ids in got.ids_TK.tolist())
        assert int(counter) == 0
        bench.check("router's weights", got.weights_TK, taken / taken.sum(1, keepdim=True))


def check_attention(
    bench: Bench, sizes: Sizes, batch: int, position: int, configs: Sequence[AttendConfig]
) -> None:
    """One new token per sequence; what lies behind it in the cache must not be read."""
    norms, kept = head_norms(bench, sizes), cache(bench, sizes, batch, position + 2)
    for part in kept:
        part[:, :, position:] = float("nan")
    qkv = bench.normal(batch, sizes.qkv)
    cos, sin = (angle[:, 0] for angle in angles(bench, sizes, position, 1))
    at = torch.tensor(position, device=bench.device)
    wide = KeyValues(*(part.double() for part in kept))
    want = attend_one(qkv.double(), exact(norms), cos.double(), sin.double(), wide, at.clone())
    for config in configs:
        mine, after = KeyValues(*(part.clone() for part in kept)), at.clone()
        got = launch_attend_one(qkv, norms, cos, sin, mine, after, None, config)
        assert int(after) == position + 1
        bench.check("attention", got, want)
        check_cache(bench, mine, wide, position + 1)


def check_chunk(bench: Bench, sizes: Sizes, tokens: int, position: int) -> None:
    """What a longer chunk runs: the rotary turn, both norms, and the choice by given logits."""
    norms, kept = head_norms(bench, sizes), cache(bench, sizes, 1, position + tokens)
    qkv = bench.normal(1, tokens, sizes.qkv)
    cos, sin = angles(bench, sizes, position, tokens)
    at = torch.tensor(position, device=bench.device)
    wide = KeyValues(*(part.double() for part in kept))
    want = rotate_and_store(qkv.double(), exact(norms), cos.double(), sin.double(), wide, at)
    got = launch_rotate_and_store(qkv, norms, cos, sin, kept, at)
    bench.check("rotary turn", got, want)
    check_cache(bench, kept, wide, position + tokens)

    x, residual = bench.normal(tokens, sizes.hidden), bench.normal(tokens, sizes.hidden)
    norm = bench.norm(sizes.hidden)
    alone = rms_norm(x.double(), norm.double(), EPS)
    bench.check("norm", launch_rms_norm(x, norm, EPS), alone)
    added = launch_add_rms_norm(x, residual, norm, EPS)
    expected = add_rms_norm(x.double(), residual.double(), norm.double(), EPS)
    for part, other in zip(added, expected, strict=True):
        bench.check("sum and norm", part, other)

    logits = bench.normal(tokens, sizes.experts)
    routes = launch_choose_experts(logits, sizes.top_k, True)
    chosen = choose_experts(logits.double(), sizes.top_k, True)
    bench.check("weights of chosen experts", routes.weights_TK, chosen.weights_TK)


def check_cache(bench: Bench, got: KeyValues, want: KeyValues, length: int) -> None:
    bench.check("stored keys", got.keys[:, :, :length], want.keys[:, :, :length])
    assert torch.equal(got.values[:, :, :length].double(), want.values[:, :, :length])


def exact(norms: HeadNorms) -> HeadNorms:
    return HeadNorms(norms.q_D.double(), norms.k_D.double(), norms.eps)
