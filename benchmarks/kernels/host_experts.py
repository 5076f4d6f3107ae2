"""Experts computed on the host: bytes of weights a second, beside the rate of reading alone.

python benchmarks/kernels/host_experts.py --out FOLDER [--threads N]

A bank holds one layer, far larger than the caches; each call computes random experts of it, and the
library's own clock says how long that took. The read rate is that of the same threads reading the
bank and doing nothing else. torch is beside it for bf16: each expert's two matrix-vector products
by torch.nn.functional.linear, on all CPUs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import Bench, parser

from residency.policies.step import IdSpace
from residency.runtime.banks import Banks
from residency.runtime.formats import FORMATS
from residency.runtime.host_experts import NativeHostExperts
from residency.runtime.host_experts.gates import Gate
from residency.runtime.host_experts.native import SILU, Library
from residency.runtime.layout import RowLayout, part_name

SHAPES = {"flash_next_moe": (512, 10, 2560, 640), "qwen3_30b_a3b": (512, 8, 2048, 768)}
DRY = {"flash_next_moe": (4, 2, 256, 128)}
TOKENS = (1, 8)
CALLS, REPEATS = 40, 5


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = options.parse_args()
    bench = Bench("host_experts", chosen)
    found = [
        row
        for shape, extents in (DRY if bench.dry else SHAPES).items()
        for name in ("bf16", "fp8_block", "nvfp4", "mxfp4")
        for row in rates(bench, shape, extents, name, chosen.threads)
    ]
    bench.write(host=found, threads=chosen.threads)


def rates(
    bench: Bench, shape: str, extents: tuple[int, int, int, int], name: str, threads: int
) -> list[dict[str, Any]]:
    experts, top_k, hidden, width = extents
    matrices = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    layout = RowLayout.of(matrices, FORMATS[name], torch.bfloat16)
    banks = Banks(IdSpace(1, experts, top_k), layout)
    fill(banks, matrices)
    host = NativeHostExperts(Library(), banks, Gate(SILU), torch.bfloat16, threads)
    read = statistics.median(host.read_rate() for _ in range(1 if bench.dry else REPEATS)) / 1e9
    rows = []
    for num_tokens in TOKENS:
        job = host.job(0, num_tokens)
        job.x_TH.normal_()
        job.weights_TK.fill_(1 / top_k)
        job.chosen_E.fill_(1)
        rates_gb = measured(bench, job, experts, layout.row_bytes, lambda job=job: timed(host, job))
        assert torch.isfinite(job.y_TH).all()
        rows.append(row_of(shape, name, "native", num_tokens, rates_gb, read))
    if name == "bf16":
        job = host.job(0, 1)
        job.x_TH.normal_()
        views = banks.weights(0)

        def by_torch() -> float:
            chosen = job.ids_TK.flatten().tolist()
            begin = time.perf_counter()
            for e in chosen:
                gate, up = F.linear(job.x_TH, views["gate_up_proj"][e]).chunk(2, dim=-1)
                F.linear(F.silu(gate) * up, views["down_proj"][e])
            return time.perf_counter() - begin

        rates_gb = measured(bench, job, experts, layout.row_bytes, by_torch)
        rows.append(row_of(shape, name, "torch", 1, rates_gb, read))
    return rows


def fill(banks: Banks, matrices: dict[str, tuple[int, int]]) -> None:
    """A few random experts, over and over."""
    views, layout = banks.weights(0), banks.layout
    for matrix, extent in matrices.items():
        few = layout.format.quantise(torch.randn(4, *extent) * 0.02)
        for suffix, stored in few.items():
            part = views[part_name(matrix, suffix)]
            for begin in range(0, len(part), 4):
                part[begin : begin + 4].copy_(stored.reshape(4, *part.shape[1:]))


def timed(host: NativeHostExperts, job: Any) -> float:
    """Seconds of one call, by the library's clock."""
    before = int(job.stats[0])
    host.run(job)
    return (int(job.stats[0]) - before) / 1e9


def measured(
    bench: Bench, job: Any, experts: int, row_bytes: int, call: Callable[[], float]
) -> list[float]:
    """GB/s of each repeat, over calls on random routes."""
    num_tokens, top_k = job.ids_TK.shape
    rates_gb = []
    for repeat in range(2 if bench.dry else 1 + REPEATS):
        seconds, num_bytes = 0.0, 0
        for _ in range(2 if bench.dry else CALLS):
            job.ids_TK.copy_(torch.rand(num_tokens, experts).topk(top_k).indices)
            seconds += call()
            num_bytes += len(job.ids_TK.unique()) * row_bytes
        if repeat:  # the first is a warm-up
            rates_gb.append(num_bytes / seconds / 1e9)
    return rates_gb


def row_of(
    shape: str, name: str, form: str, num_tokens: int, rates_gb: list[float], read: float
) -> dict[str, Any]:
    median = statistics.median(rates_gb)
    row = {"shape": shape, "format": name, "form": form, "tokens": num_tokens}
    row |= {"gb_s": median, "min": min(rates_gb), "max": max(rates_gb)}
    row |= {"read_gb_s": read, "share": median / read if read else None}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
