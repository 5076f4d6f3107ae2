"""Time of the kernels that move and run one layer's experts, over their candidates.

python benchmarks/kernels/experts.py --out FOLDER

Decode: both passes over a few tokens' experts, apart and together. Chunks: the grouped products,
and what sorts their pairs and adds their results. Gather: rows copied on the device (from the
host: admission.py). Weights, tokens and routes are random; results are first held against the
definitions, computed in more bits than the kernels have.
"""

from __future__ import annotations

from typing import NamedTuple

import timing
import torch
from timing import Bench
from torch import Tensor

from residency.runtime.kernels.activations import SILU
from residency.runtime.kernels.decode_experts import (
    DOWN_CONFIGS,
    GATE_UP_CONFIGS,
    choose_down,
    choose_gate_up,
    down,
    gate_up,
    launch_down,
    launch_gate_up,
)
from residency.runtime.kernels.formats import ExpertShape, Plain
from residency.runtime.kernels.gather import ON_DEVICE, GatherConfig, gather, launch_gather
from residency.runtime.kernels.grouped_gemm import (
    CHUNK_TILES,
    ChunkTiles,
    choose_tiles,
    combine,
    launch_combine,
    launch_run_group,
    run_group,
)
from residency.runtime.kernels.grouping import group_pairs, launch_group_pairs

MODELS = {"qwen3_30b_a3b": (2048, 768, 128, 8), "flash_next_moe": (2560, 640, 512, 10)}
TINY = {"tiny": (32, 16, 4, 2)}
DECODE_CALLS = 24
GATHERS = [ON_DEVICE, GatherConfig(132 * 16, 8192, 4), GatherConfig(132 * 4, 32768, 8)]
TINY_GATHER = GatherConfig(3, 1024, 4)


class Layer(NamedTuple):
    """A model's experts, in shuffled rows."""

    model: str
    shape: ExpertShape
    num_experts: int
    top_k: int
    row_of: Tensor
    rows: Tensor


class Chunk(NamedTuple):
    """Tokens and their routes, each expert as likely."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def main() -> None:
    bench = Bench("kernels-experts", timing.parser(__doc__).parse_args())
    for model, sizes in (TINY if bench.dry else MODELS).items():
        layer = made_up(bench, model, *sizes)
        check_decode(bench, layer)
        check_chunk(bench, layer)
        check_gather(bench, layer)
        for tokens in (2,) if bench.dry else (1, 2, 4, 8):
            time_decode(bench, layer, tokens)
        for tokens in (12,) if bench.dry else (16, 64, 256, 512, 1024, 2048, 4096, 8192):
            time_chunk(bench, layer, tokens)
        time_gather(bench, layer)
        del layer  # before the next model's is made
    bench.write()


def made_up(
    bench: Bench, model: str, hidden: int, width: int, num_experts: int, top_k: int
) -> Layer:
    shape = ExpertShape(hidden, width, Plain(bench.dtype))
    rows = torch.empty(num_experts, shape.row_bytes, dtype=torch.uint8, device=bench.device)
    for part in rows.split(64):
        part.view(bench.dtype).normal_(0, hidden**-0.5)
    row_of = torch.randperm(num_experts, device=bench.device).int()
    return Layer(model, shape, num_experts, top_k, row_of, rows)


def routed(bench: Bench, layer: Layer, tokens: int) -> Chunk:
    scores = torch.rand(tokens, layer.num_experts, device=bench.device)
    weights, ids = scores.topk(layer.top_k, dim=1)
    x = bench.normal(tokens, layer.shape.hidden)
    return Chunk(x, ids, weights / weights.sum(1, keepdim=True))


def check_decode(bench: Bench, layer: Layer) -> None:
    experts = layer.rows, layer.shape
    for tokens in (2,) if bench.dry else (1, 3, 8):
        x, ids, weights = routed(bench, layer, tokens)
        want = gate_up(x.double(), ids, weights, layer.row_of, *experts, SILU)
        for config in bench.candidates(GATE_UP_CONFIGS):
            got = launch_gate_up(x, ids, weights, layer.row_of, *experts, SILU, config)
            assert torch.equal(got.row, want.row) and torch.equal(got.weight, want.weight)
            bench.check(f"{layer.model} gate_up", got.act, want.act)
        total = down(got._replace(act=got.act.double()), *experts, x.double())
        for config in bench.candidates(DOWN_CONFIGS):
            y = launch_down(got, *experts, x, config=config)
            bench.check(f"{layer.model} down", y, total)


def time_decode(bench: Bench, layer: Layer, tokens: int) -> None:
    row_of, rows, shape = layer.row_of, layer.rows, layer.shape
    number = timing.DRY_CALLS if bench.dry else DECODE_CALLS
    chunks = [routed(bench, layer, tokens) for _ in range(number)]
    used = sum(chunk.ids.unique().numel() for chunk in chunks) / number
    first, whole = used * shape.down_offset_bytes, used * shape.row_bytes
    about = {"model": layer.model, "tokens": tokens}
    for config in bench.candidates(GATE_UP_CONFIGS):
        calls = [
            lambda c=c, config=config: launch_gate_up(*c, row_of, rows, shape, SILU, config)
            for c in chunks
        ]
        chosen = config == choose_gate_up(shape)
        bench.time("gate_up", calls, first, **about, config=config, chosen=chosen)
    made = [launch_gate_up(*chunk, row_of, rows, shape, SILU) for chunk in chunks]
    for config in bench.candidates(DOWN_CONFIGS):
        calls = [
            lambda a=a, config=config: launch_down(a, rows, shape, config=config) for a in made
        ]
        chosen = config == choose_down(shape)
        bench.time("down", calls, whole - first, **about, config=config, chosen=chosen)

    def both(chunk: Chunk) -> Tensor:
        activated = launch_gate_up(*chunk, row_of, rows, shape, SILU)
        return launch_down(activated, rows, shape, chunk.x)

    bench.time("gate_up and down", [lambda c=c: both(c) for c in chunks], whole, **about)


def check_chunk(bench: Bench, layer: Layer) -> None:
    """All tiles, the experts at once and in groups of any order, whose bits must be the same."""
    tokens, shape = (12 if bench.dry else 200), layer.shape
    x, ids, weights = routed(bench, layer, tokens)
    pairs = launch_group_pairs(ids, layer.num_experts)
    expected = group_pairs(ids, layer.num_experts)
    assert all(torch.equal(a, b) for a, b in zip(pairs, expected, strict=True))
    everyone = torch.arange(layer.num_experts, dtype=torch.int32, device=bench.device)
    shuffled = everyone[torch.randperm(len(everyone), device=bench.device)]
    experts = layer.row_of, layer.rows, shape, SILU

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
        bench.check(f"{layer.model} grouped products", at_once[1], want[1])
    got = launch_combine(at_once[1], pairs, weights, x)
    total = combine(at_once[1].double(), pairs, weights, x.double())
    bench.check(f"{layer.model} combine", got, total)


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
    about = {"model": layer.model, "tokens": tokens}
    for tiles in bench.candidates(CHUNK_TILES):
        if not worth_trying(tiles.gate_up.block_m, places / num_experts) and tiles != chosen:
            continue

        def call(tiles: ChunkTiles = tiles) -> None:
            experts = layer.row_of, layer.rows, shape, SILU
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
            about = {"model": layer.model, "rows": number, "config": config}
            num_bytes = 2 * number * layer.shape.row_bytes
            bench.time("gather", calls, num_bytes, **about, chosen=config == ON_DEVICE)


if __name__ == "__main__":
    main()
