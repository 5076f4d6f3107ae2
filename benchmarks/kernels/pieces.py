"""Time of short chunks between their experts: plain kernels, pieces, and captured pieces.

python benchmarks/kernels/pieces.py --out FOLDER

Short chunks wait for the host to launch, so times are the host's: until it has launched a chunk,
and until the device is done as well. The model is 24 layers of Qwen3-30B-A3B's shape with random
weights, its experts an identity; a chunk's routes, cache and output must have the same bits with
captured pieces as with uncaptured ones. Beside them, what a bucket's capture takes of time and
memory.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import timing
import torch
from timing import Bench
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, StaticCache

from residency.runtime.replacements import Seam, apply, pieces

FULL = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
}
TINY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
VOCABULARY = 1000
CONTEXT = 2560
MODES = ("plain", "pieces", "captured pieces")
UNTOUCHED = 7.0
OTHER_SHAPES = 5e-2  # relative error between bf16 products of other shapes, over all layers


def main() -> None:
    warnings.simplefilter("error", RuntimeWarning)  # of a refused capture
    bench = Bench("kernels-pieces", timing.parser(__doc__).parse_args())
    lengths, positions = ((12,), (9,)) if bench.dry else ((16, 64, 100, 256, 512), (0, 2000))
    with torch.inference_mode():
        runner = Runner(bench)
        buckets = [] if bench.dry else [capture(runner, bucket) for bucket in pieces.BUCKETS]
        chunks = [chunk(runner, tokens, begin) for tokens in lengths for begin in positions]
    bench.write(buckets=buckets, chunks=chunks)


def made_up(bench: Bench) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        intermediate_size=64,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        **(TINY if bench.dry else FULL),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype)
        for layer in model.model.layers:
            layer.mlp.experts = nn.Identity()
    model = model.to_empty(device=bench.device).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    rotary = model.model.rotary_emb  # its frequencies are no parameters
    model.model.rotary_emb = type(rotary)(config).to(bench.device)
    return model


class Runner:
    """The model with fused layers over a static cache of random contents, in one of the modes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.position = 0
        self.routes: list[Tensor] | None = None  # where it is a list, chunks add theirs
        model = made_up(bench)
        assert apply(model, Seam(lambda: self.position, self._add_experts), on_cpu=bench.dry)
        self.body: Any = model.get_decoder()
        self.pieces: pieces.Pieces = self.body.layers[0].forward.__self__._pieces
        self.cache = StaticCache(config=model.config, max_cache_len=64 if bench.dry else CONTEXT)
        self.use("plain")
        self.run(self.tokens(12), 0)  # makes the cache
        for entry in self.cache.layers:
            entry.keys.normal_()
            entry.values.normal_()

    def _add_experts(self, _: Any, x: Tensor, ids: Tensor, weights: Tensor, h: Tensor) -> Tensor:
        if self.routes is not None:
            self.routes += [x.clone(), ids.clone(), weights.clone()]
        return h + x

    def tokens(self, number: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (1, number), device=self.bench.device)

    def use(self, mode: str) -> None:
        pieces.suits = lambda hidden_BSH: mode != "plain"
        self.pieces.graphs.captures = mode == "captured pieces"

    def run(self, ids: Tensor, position: int) -> tuple[Tensor, float, float]:
        """The output, and milliseconds until the host was done and until the device was."""
        self.position = position
        for entry in self.cache.layers:
            entry.cumulative_length.fill_(position)
        self.wait()
        start = time.perf_counter()
        out = self.body(ids, cache=self.cache, use_cache=True).last_hidden_state
        launched = time.perf_counter()
        self.wait()
        done = time.perf_counter()
        return out, (launched - start) * 1e3, (done - start) * 1e3

    def wait(self) -> None:
        if not self.bench.dry:
            torch.cuda.synchronize()

    def traces(self, ids: Tensor, position: int) -> list[Tensor]:
        """All that a chunk leaves behind: its output, its part of the cache, and its routes."""
        end = position + ids.shape[1]
        kept = [part for entry in self.cache.layers for part in (entry.keys, entry.values)]
        for part in kept:
            part[:, :, position:] = UNTOUCHED
        self.routes = []
        out, routes = self.run(ids, position)[0].clone(), self.routes
        self.routes = None
        assert all(int(entry.cumulative_length) == end for entry in self.cache.layers)
        assert all(bool((part[:, :, end:] == UNTOUCHED).all()) for part in kept), "padding was kept"
        return [out, *(part[:, :, position:end].clone() for part in kept), *routes]


def capture(runner: Runner, bucket: int) -> dict[str, float]:
    """What a bucket's second use, which captures it, takes more than a later one."""
    ids = runner.tokens(bucket)
    runner.use("captured pieces")
    runner.run(ids, 0)  # compiles
    before = memory()
    capturing = runner.run(ids, 0)[2]
    taken = {name: round((now - before[name]) / 1e6, 2) for name, now in memory().items()}
    replaying = min(runner.run(ids, 0)[2] for _ in range(3))
    assert runner.pieces.graphs.captures, "not everything was captured"
    buffers = runner.pieces._buffers.first(bucket)
    return {
        "rows": bucket,
        "capture_ms": round(capturing - replaying, 2),
        **taken,
        "buffers_mb": round(buffers.num_bytes / 1e6, 2),
    }


def memory() -> dict[str, int]:
    """Bytes, named for what is reported of them."""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"allocated_mb": allocated, "reserved_mb": reserved, "device_mb": total - free}


def chunk(runner: Runner, tokens: int, position: int) -> dict[str, Any]:
    """Times of a chunk by mode, once its bits have been compared."""
    bench, ids = runner.bench, runner.tokens(tokens)

    def in_mode(mode: str) -> list[Tensor]:
        runner.use(mode)
        return runner.traces(ids, position)

    plain, eager = in_mode("plain"), in_mode("pieces")
    bench.check(
        f"{tokens} tokens at {position}: pieces and plain", eager[0], plain[0], OTHER_SHAPES
    )
    for _ in range(1 if bench.dry else 2):  # the buffers hold something else each time
        captured = in_mode("captured pieces")
        same = all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
        assert same, f"{tokens} tokens at {position}: captured pieces give other bits"
    row: dict[str, Any] = {"tokens": tokens, "position": position}
    for mode in MODES:
        runner.use(mode)
        row[mode] = medians(lambda: runner.run(ids, position)[1:], bench.dry)
    print(row, flush=True)
    return row


def medians(run: Callable[[], tuple[float, float]], dry: bool) -> dict[str, float] | None:
    run()
    if dry:
        return None
    host, wall = zip(*(run() for _ in range(timing.REPEATS)), strict=True)
    return {
        "host_ms": round(statistics.median(host), 3),
        "wall_ms": round(statistics.median(wall), 3),
    }


if __name__ == "__main__":
    main()
