"""Time of the kernels that move and run one layer's experts, over their candidates.

python benchmarks/kernels/experts.py --out FOLDER [--models NAME ...] [--formats NAME ...]

Decode: both passes over a few tokens' experts, apart and together. Chunks: the grouped products,
and what sorts their pairs and adds their results. Gather: rows copied on the device (from the
host: admission.py). Weights, tokens and routes are random; results are first held against the
definitions, computed in more bits than the kernels have. Each model in each format that can hold
its experts; gpt_oss_20b with biases, its gate and, in bf16, its transposed matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import timing
import torch
from timing import Bench
from torch import Tensor

from residency.runtime.formats import FORMATS, ExpertFormat, Plain
from residency.runtime.kernels.activations import SILU, Activation, clamped_swiglu
from residency.runtime.kernels.decode_experts import down, gate_up, launch_down, launch_gate_up
from residency.runtime.kernels.expert_tiles import (
    CHUNK_TILES,
    ChunkTiles,
    choose_tiles,
    down_configs,
    gate_up_configs,
)
from residency.runtime.kernels.formats import ExpertShape
from residency.runtime.kernels.gather import ON_DEVICE, GatherConfig, gather, launch_gather
from residency.runtime.kernels.grouped_gemm import (
    combine,
    launch_combine,
    launch_run_group,
    run_group,
)
from residency.runtime.kernels.grouping import group_pairs, launch_group_pairs

MODELS = {
    "qwen3_30b_a3b": (2048, 768, 128, 8),
    "flash_next_moe": (2560, 640, 512, 10),
    "gpt_oss_20b": (2880, 2880, 32, 4),
}
TINY = {"tiny": (32, 32, 4, 2), "tiny_gpt_oss": (32, 32, 4, 1)}
TINY_FORMATS = {"tiny": ["bf16", "nvfp4"], "tiny_gpt_oss": ["mxfp4"]}
STORED = ["bf16", "fp8_block", "nvfp4", "mxfp4"]
DECODE_CALLS = 24
GATHERS = [ON_DEVICE, GatherConfig(132 * 16, 8192, 4), GatherConfig(132 * 4, 32768, 8)]
TINY_GATHER = GatherConfig(3, 1024, 4)


class Layer(NamedTuple):
    """A model's experts in one format, in shuffled rows."""

    model: str
    shape: ExpertShape
    activation: Activation
    num_experts: int
    top_k: int
    row_of: Tensor
    rows: Tensor

    @property
    def about(self) -> dict[str, str]:
        return {"model": self.model, "format": self.shape.format.name}

    @property
    def title(self) -> str:
        return " ".join(self.about.values())


class Chunk(NamedTuple):
    """Tokens and their routes, each expert as likely."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--models", nargs="+", help="some of those that there are")
    parser.add_argument("--formats", nargs="+", help=f"some of {', '.join(STORED)}")
    options = parser.parse_args()
    bench = Bench("kernels-experts", options)
    models = TINY if bench.dry else MODELS
    for model in options.models or models:
        for name in options.formats or (TINY_FORMATS[model] if bench.dry else STORED):
            hidden, width, num_experts, top_k = models[model]
            form = Plain(bench.dtype) if name == "bf16" else FORMATS[name]
            is_gpt_oss = "gpt_oss" in model
            has_outer = len(form.stored(32, 32)) == 3
            if form.fault(hidden, width) is not None or (is_gpt_oss and has_outer):
                continue
            layer = made_up(bench, model, form, hidden, width, num_experts, top_k)
            time_all(bench, layer)
            del layer  # before the next one is made
    bench.write()


def time_all(bench: Bench, layer: Layer) -> None:
    check_decode(bench, layer)
    check_chunk(bench, layer)
    check_gather(bench, layer)
    for tokens in (1,) if bench.dry else (1, 2, 4, 8):
        time_decode(bench, layer, tokens)
    for tokens in (3,) if bench.dry else (16, 64, 256, 512, 1024, 2048, 4096, 8192):
        time_chunk(bench, layer, tokens)
    time_gather(bench, layer)


def made_up(
    bench: Bench,
    model: str,
    form: ExpertFormat,
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
) -> Layer:
    is_gpt_oss = "gpt_oss" in model
    shape = ExpertShape.of(
        hidden,
        width,
        form,
        bench.dtype,
        interleaved=is_gpt_oss,
        has_bias=is_gpt_oss,
        transposed=is_gpt_oss,
    )
    rows = torch.empty(num_experts, shape.row_bytes, dtype=torch.uint8, device=bench.device)
    sizes = [(2 * width, hidden), (hidden, width), (2 * width,), (hidden,)]
    for part in rows.split(8):
        gate_up, down, *biases = (
            torch.randn(len(part), *size, device=bench.device) * hidden**-0.5 for size in sizes
        )
        part.copy_(shape.pack(gate_up, down, *(biases if is_gpt_oss else ())))
    row_of = torch.randperm(num_experts, device=bench.device).int()
    activation = clamped_swiglu(1.702, 7.0) if is_gpt_oss else SILU
    return Layer(model, shape, activation, num_experts, top_k, row_of, rows)


def routed(bench: Bench, layer: Layer, tokens: int) -> Chunk:
    scores = torch.rand(tokens, layer.num_experts, device=bench.device)
    weights, ids = scores.topk(layer.top_k, dim=1)
    x = bench.normal(tokens, layer.shape.hidden)
    return Chunk(x, ids, weights / weights.sum(1, keepdim=True))


def check_decode(bench: Bench, layer: Layer) -> None:
    shape, gate = layer.shape, layer.activation
    experts = layer.rows, shape
    for tokens in (1,) if bench.dry else (1, 3, 8):
        x, ids, weights = routed(bench, layer, tokens)
        want = gate_up(x.double(), ids, weights, layer.row_of, *experts, gate)
        for config in bench.candidates(gate_up_configs(shape)):
            got = launch_gate_up(x, ids, weights, layer.row_of, *experts, gate, config)
            assert torch.equal(got.row, want.row) and torch.equal(got.weight, want.weight)
            bench.check(f"{layer.title} gate_up", got.act, want.act)
        total = down(got._replace(act=got.act.double()), *experts, x.double())
        for config in bench.candidates(down_configs(shape)):
            y = launch_down(got, *experts, x, config=config)
            bench.check(f"{layer.title} down", y, total)


def time_decode(bench: Bench, layer: Layer, tokens: int) -> None:
    row_of, rows, shape, gate = layer.row_of, layer.rows, layer.shape, layer.activation
    number = timing.DRY_CALLS if bench.dry else DECODE_CALLS
    chunks = [routed(bench, layer, tokens) for _ in range(number)]
    used = sum(chunk.ids.unique().numel() for chunk in chunks) / number
    first, whole = used * shape.down_offset_bytes, used * shape.row_bytes
    about = {**layer.about, "tokens": tokens}
    for config in bench.candidates(gate_up_configs(shape)):
        calls = [
            lambda c=c, config=config: launch_gate_up(*c, row_of, rows, shape, gate, config)
            for c in chunks
        ]
        chosen = config == gate_up_configs(shape)[0]
        bench.time("gate_up", calls, first, **about, config=config, chosen=chosen)
    made = [launch_gate_up(*chunk, row_of, rows, shape, gate) for chunk in chunks]
    for config in bench.candidates(down_configs(shape)):
        calls = [
            lambda a=a, config=config: launch_down(a, rows, shape, config=config) for a in made
        ]
        chosen = config == down_configs(shape)[0]
        bench.time("down", calls, whole - first, **about, config=config, chosen=chosen)

    def both(chunk: Chunk) -> Tensor:
        activated = launch_gate_up(*chunk, row_of, rows, shape, gate)
        return launch_down(activated, rows, shape, chunk.x)

    bench.time("gate_up and down", [lambda c=c: both(c) for c in chunks], whole, **about)


def check_chunk(bench: Bench, layer: Layer) -> None:
    """All tiles, the experts at once and in groups of any order, whose bits must be the same."""
    tokens, shape = (3 if bench.dry else 200), layer.shape
    x, ids, weights = routed(bench, layer, tokens)
    pairs = launch_group_pairs(ids, layer.num_experts)
    expected = group_pairs(ids, layer.num_experts)
    assert all(torch.equal(a, b) for a, b in zip(pairs, expected, strict=True))
    everyone = torch.arange(layer.num_experts, dtype=torch.int32, device=bench.device)
    shuffled = everyone[torch.randperm(len(everyone), device=bench.device)]
    experts = layer.row_of, layer.rows, shape, layer.activation

    def outputs(like: Tensor) -> tuple[Tensor, Tensor]:
        nan, places = float("nan"), ids.numel()
        return like.new_full((places, shape.width), nan), like.new_full((places, shape.hidden), nan)

    want = outputs(x.double())
    run_group(x.double(), pairs, everyone, *experts, *want)
    for config in bench.candidates(CHUNK_TILES):
        at_once, in_groups = outputs(x), outputs(x)
        launch_run_group(x, pairs, everyone, *experts, *at_once, config)
        for group in shuffled.split(len(everyone) // 4 + 1):
            launch_run_group(x, pairs, group, *experts, *in_groups, config)
        assert all(torch.equal(a, b) for a, b in zip(at_once, in_groups, strict=True)), config
        bench.check(f"{layer.title} grouped products", at_once[1], want[1])
    got = launch_combine(at_once[1], pairs, weights, x)
    total = combine(at_once[1].double(), pairs, weights, x.double())
    bench.check(f"{layer.title} combine", got, total)


def time_chunk(bench: Bench, layer: Layer, tokens: int) -> None:
    shape, num_experts = layer.shape, layer.num_experts
    x, ids, weights = routed(bench, layer, tokens)
    pairs = launch_group_pairs(ids, num_experts)
    places = ids.numel()
    act, y = bench.normal(places, shape.width), bench.normal(places, shape.hidden)
    everyone = torch.arange(num_experts, dtype=torch.int32, device=bench.device)
    chosen = choose_tiles(places, num_experts, shape, x.dtype)
    num_bytes = ids.unique().numel() * shape.row_bytes
    work = 6.0 * places * shape.hidden * shape.width
    about = {**layer.about, "tokens": tokens}
    for tiles in bench.candidates(CHUNK_TILES):
        if not worth_trying(tiles.gate_up.block_m, places / num_experts) and tiles != chosen:
            continue

        def call(tiles: ChunkTiles = tiles) -> None:
            experts = layer.row_of, layer.rows, shape, layer.activation
            launch_run_group(x, pairs, everyone, *experts, act, y, tiles)

        known = {"config": tiles, "chosen": tiles == chosen}
        bench.time("grouped products", [call] * 2, num_bytes, work, **about, **known)
    sort = [lambda: launch_group_pairs(ids, num_experts)] * 4
    bench.time("group_pairs", sort, ids.nbytes, **about)
    add = [lambda: launch_combine(y, pairs, weights, x)] * 4
    bench.time("combine", add, y.nbytes + 2 * x.nbytes, **about)


def worth_trying(block_m: int, places: float) -> bool:
    """Neither far more rows of a tile than an expert's places, nor far fewer."""
    return min(places, 256) / 8 <= block_m <= max(16, 4 * places)


def check_gather(bench: Bench, layer: Layer) -> None:
    bank, config = layer.rows[:16], TINY_GATHER if bench.dry else None
    on_host = bank.cpu() if bench.dry else bank.cpu().pin_memory()
    experts, slots = (torch.randperm(len(bank), device=bench.device).int() for _ in range(2))
    for number in (0, 1, 3):
        copies = torch.tensor([number], dtype=torch.int32, device=bench.device)
        before = torch.randint_like(bank, 256)
        want = before.clone()
        gather(bank, want, experts, slots, copies)
        for source in (bank, on_host):
            got = before.clone()
            launch_gather(source, got, experts, slots, copies, config)
            assert torch.equal(got, want), f"gather of {number} from {source.device}"


def time_gather(bench: Bench, layer: Layer) -> None:
    target = torch.randint_like(layer.rows, 256)
    experts, slots = (
        torch.randperm(layer.num_experts, device=bench.device).int() for _ in range(2)
    )
    for number in (2,) if bench.dry else (1, 8, 64):
        copies = torch.tensor([number], dtype=torch.int32, device=bench.device)
        lists = list(zip(experts.split(number), slots.split(number), strict=True))
        for config in [TINY_GATHER] if bench.dry else GATHERS:
            calls = [
                lambda e=e, s=s, n=copies, c=config: launch_gather(layer.rows, target, e, s, n, c)
                for e, s in lists
            ]
            about = {**layer.about, "rows": number, "config": config}
            num_bytes = 2 * number * layer.shape.row_bytes
            bench.time("gather", calls, num_bytes, **about, chosen=config == ON_DEVICE)


if __name__ == "__main__":
    main()
