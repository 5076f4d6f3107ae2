"""Time of a decoder layer's kernels other than its experts', apart and one after another.

python benchmarks/kernels/dense.py --out FOLDER [--early]

Few tokens: norm and projections, the router, and attention over a static cache, each over its
candidates; then a whole layer without its experts, by context. Longer chunks: such a layer by
length and position. The layer is Qwen3-30B-A3B's; the router is Flash-Next-MoE's as well. Weights
and caches are random; results are first held against the definitions in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import layer
import timing
import torch
import torch.nn.functional as F
from layer import EPS, QWEN3_30B_A3B, Layer, Sizes
from timing import Bench
from torch import Tensor

from residency.runtime.kernels.attention import (
    ATTEND_CONFIGS,
    AttendConfig,
    Scratch,
    launch_attend_one,
)
from residency.runtime.kernels.dense import (
    DENSE_CONFIGS,
    DenseConfig,
    choose_dense,
    launch_add_rms_norm,
    launch_linear_few,
    launch_norm_linear_few,
    launch_rms_norm,
)
from residency.runtime.kernels.rotary import launch_rotate_and_store
from residency.runtime.kernels.routing import (
    ROUTER_CONFIGS,
    launch_choose_experts,
    launch_route_few,
)
from residency.runtime.replacements.static_cache import causal_attention

LAYERS = 24
ROUTERS = {"qwen3_30b_a3b": QWEN3_30B_A3B, "flash_next_moe": Sizes(2560, 0, 0, 0, 512, 10)}
SPARE = 32  # each run of a step, replays and all, advances its position by one


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument(
        "--early", action="store_true", help="each candidate as a programmatic launch as well"
    )
    options = parser.parse_args()
    bench = Bench("kernels-dense", options)
    early = options.early and not bench.dry  # the interpreter has no such launches
    sizes = layer.TINY if bench.dry else QWEN3_30B_A3B
    dense = with_early(bench.candidates(DENSE_CONFIGS), early)
    router = with_early(bench.candidates(ROUTER_CONFIGS), early)
    attend = with_early(bench.candidates(ATTEND_CONFIGS), early)
    check(bench, sizes, dense, router, attend)
    few = (2,) if bench.dry else (1, 4, 8)
    for tokens in few:
        time_products(bench, sizes, tokens, dense)
        for model, shape in ({"tiny": sizes} if bench.dry else ROUTERS).items():
            time_router(bench, model, shape, tokens, router)
    for batch in (1,) if bench.dry else (1, 4):
        for context in (5,) if bench.dry else (200, 1024, 4096):
            time_attention(bench, sizes, batch, context, attend)
            time_step(bench, sizes, batch, context)
    for tokens in (12,) if bench.dry else (16, 64, 256, 512):
        for position in (20,) if bench.dry else (0, 2000):
            time_chunk(bench, sizes, tokens, position)
    bench.write()


def with_early(configs: Sequence[Any], early: bool) -> list[Any]:
    return [*configs, *(config._replace(early=True) for config in configs if early)]


def check(
    bench: Bench,
    sizes: Sizes,
    dense: list[DenseConfig],
    router: list[DenseConfig],
    attend: list[AttendConfig],
) -> None:
    for tokens in (2,) if bench.dry else (1, 4, 8):
        layer.check_products(bench, sizes, tokens, dense)
        for shape in (sizes,) if bench.dry else ROUTERS.values():
            layer.check_router(bench, shape, tokens, router)
    contexts = [(1, 0), (1, 31), (1, 199), (4, 700), (1, 4096), (8, 4095)]
    for batch, position in [(1, 33)] if bench.dry else contexts:
        layer.check_attention(bench, sizes, batch, position, attend)
    for tokens, position in [(5, 9)] if bench.dry else [(9, 0), (37, 1000), (512, 4000)]:
        layer.check_chunk(bench, sizes, tokens, position)


def time_products(bench: Bench, sizes: Sizes, tokens: int, configs: list[DenseConfig]) -> None:
    """Both projections, and torch's matrix product of the same sizes for comparison."""
    x, attended = bench.normal(tokens, sizes.hidden), bench.normal(tokens, sizes.attended)
    norm, residual = bench.norm(sizes.hidden), bench.normal(tokens, sizes.hidden)
    qkv, out = (
        [bench.weight(*extent) for _ in range(bench.copies(extent[0] * extent[1] * x.itemsize))]
        for extent in ((sizes.qkv, sizes.hidden), (sizes.hidden, sizes.attended))
    )
    for config in configs:
        about = {"tokens": tokens, "config": config}
        calls = [lambda w=w, c=config: launch_norm_linear_few(x, norm, EPS, w, c) for w in qkv]
        chosen = config == choose_dense(sizes.hidden)
        bench.time("norm and qkv", calls, qkv[0].nbytes, **about, chosen=chosen)
        calls = [lambda w=w, c=config: launch_linear_few(attended, w, residual, c) for w in out]
        chosen = config == choose_dense(sizes.attended)
        bench.time("out", calls, out[0].nbytes, **about, chosen=chosen)
    calls = [lambda w=w: F.linear(x, w) for w in qkv]
    bench.time("qkv by torch", calls, qkv[0].nbytes, tokens=tokens)
    calls = [lambda w=w: F.linear(attended, w) for w in out]
    bench.time("out by torch", calls, out[0].nbytes, tokens=tokens)


def time_router(
    bench: Bench, model: str, sizes: Sizes, tokens: int, configs: list[DenseConfig]
) -> None:
    x, norm, counter = (
        bench.normal(tokens, sizes.hidden),
        bench.norm(sizes.hidden),
        layer.arrivals(bench),
    )
    number = bench.copies(sizes.experts * sizes.hidden * x.itemsize)
    gates = [bench.weight(sizes.experts, sizes.hidden) for _ in range(number)]
    for config in configs:
        calls = [
            lambda g=g, c=config: launch_route_few(x, norm, EPS, g, sizes.top_k, True, counter, c)
            for g in gates
        ]
        about = {"model": model, "tokens": tokens, "config": config}
        bench.time("router", calls, gates[0].nbytes, **about, chosen=config == ROUTER_CONFIGS[0])


def time_attention(
    bench: Bench, sizes: Sizes, batch: int, context: int, configs: list[AttendConfig]
) -> None:
    qkv, norms = bench.normal(batch, sizes.qkv), layer.head_norms(bench, sizes)
    num_bytes = batch * context * sizes.cached * qkv.itemsize
    caches = [
        layer.cache(bench, sizes, batch, context + SPARE) for _ in range(bench.copies(num_bytes))
    ]
    cos, sin = (angle[:, 0] for angle in layer.angles(bench, sizes, context, 1))
    for config in configs:
        scratch = Scratch.empty(batch, sizes.heads, caches[0], config)
        positions = [at_context(bench, context) for _ in caches]
        calls = [
            lambda kept=kept, at=at, s=scratch, c=config: launch_attend_one(
                qkv, norms, cos, sin, kept, at, s, c
            )
            for kept, at in zip(caches, positions, strict=True)
        ]
        about = {"batch": batch, "context": context, "config": config}
        chosen = config == ATTEND_CONFIGS[0]
        bench.time("attention", calls, num_bytes, **about, chosen=chosen)


def at_context(bench: Bench, context: int) -> Tensor:
    return torch.tensor(context, device=bench.device)


def time_step(bench: Bench, sizes: Sizes, batch: int, context: int) -> None:
    """One layer of a decode step as the kernels are chosen; an addition stands for the experts."""
    layers = made_up_layers(bench, sizes, batch, context + SPARE)
    x, counter = bench.normal(batch, sizes.hidden), layer.arrivals(bench)
    scratch = Scratch.empty(batch, sizes.heads, layers[0].cache)
    cos, sin = (angle[:, 0] for angle in layer.angles(bench, sizes, context, 1))

    def call(own: Layer, position: Tensor) -> Tensor:
        qkv = launch_norm_linear_few(x, own.input_norm, EPS, own.qkv)
        heads = own.head_norms, cos, sin, own.cache
        attended = launch_attend_one(qkv, *heads, position, scratch)
        h = launch_linear_few(attended, own.out, x)
        return (
            h + launch_route_few(h, own.router_norm, EPS, own.gate, sizes.top_k, True, counter)[0]
        )

    positions = [at_context(bench, context) for _ in layers]
    calls = [lambda o=o, p=p: call(o, p) for o, p in zip(layers, positions, strict=True)]
    num_bytes = (sizes.weights + batch * context * sizes.cached) * x.itemsize
    bench.time("layer of a step", calls, num_bytes, batch=batch, context=context)


def time_chunk(bench: Bench, sizes: Sizes, tokens: int, position: int) -> None:
    """One layer of a chunk longer than few tokens; an addition stands for the experts."""
    layers = made_up_layers(bench, sizes, 1, position + tokens)
    x, at = bench.normal(tokens, sizes.hidden), at_context(bench, position)
    cos, sin = layer.angles(bench, sizes, position, tokens)

    def call(own: Layer) -> Tensor:
        qkv = F.linear(launch_rms_norm(x, own.input_norm, EPS), own.qkv)[None]
        q = launch_rotate_and_store(qkv, own.head_norms, cos, sin, own.cache, at)
        at.fill_(position)  # in place of the advance, so that all layers and replays are alike
        attended = causal_attention(q.transpose(1, 2), own.cache, position)
        out = F.linear(attended.transpose(1, 2).reshape(tokens, -1), own.out)
        h, normed = launch_add_rms_norm(out, x, own.router_norm, EPS)
        launch_choose_experts(F.linear(normed, own.gate), sizes.top_k, True)
        return h + normed

    keys = position + tokens
    num_bytes = (sizes.weights + keys * sizes.cached) * x.itemsize
    pairs = tokens * (position + (tokens + 1) / 2)  # of a query and a key that it sees
    work = 2.0 * tokens * sizes.weights + 4.0 * pairs * sizes.attended
    calls = [lambda o=own: call(o) for own in layers]
    bench.time("layer of a chunk", calls, num_bytes, work, tokens=tokens, position=position)


def made_up_layers(bench: Bench, sizes: Sizes, batch: int, context: int) -> list[Layer]:
    number = timing.DRY_CALLS if bench.dry else LAYERS
    return [layer.made_up(bench, sizes, batch, context) for _ in range(number)]


if __name__ == "__main__":
    main()
