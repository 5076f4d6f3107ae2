"""How fast a device reads host memory, by how that memory was taken.

python benchmarks/kernels/host_memory.py --out FOLDER [--layers 24]

Each kind holds as many layers of 128 experts of 9.4 MB as are asked for (24: 29 GB). Copies are of
whole layers by the copy engine; gathers read random experts of one layer after another, in a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Bench, graph_us, parser
from torch import Tensor

from residency.runtime.host_memory import empty_rows
from residency.runtime.kernels.gather import FROM_HOST, GatherConfig, launch_gather
from residency.runtime.pinning import Pinned

EXPERTS, ROW_BYTES = 128, 9437184
GATHERED = (1, 5, 8, 64)
CONFIGS = (FROM_HOST, GatherConfig(264, 8192, 4), GatherConfig(132, 16384, 8))
THREADS = 16

Take = Callable[[int, int], Tensor]


def small_pages(num_rows: int, row_bytes: int) -> Tensor:
    return torch.empty(num_rows, row_bytes, dtype=torch.uint8)


def taken_pinned(num_rows: int, row_bytes: int) -> Tensor:
    pin = torch.cuda.is_available()  # else a dry run
    return torch.empty(num_rows, row_bytes, dtype=torch.uint8, pin_memory=pin)


KINDS: dict[str, tuple[Take, bool]] = {
    "registered": (small_pages, True),
    "registered, huge pages": (empty_rows, True),
    "allocated pinned": (taken_pinned, False),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=24)
    chosen = options.parse_args()
    bench = Bench("host_memory", chosen)
    row_bytes = 4096 if bench.dry else ROW_BYTES
    layers = 2 if bench.dry else chosen.layers
    found = [rates(bench, name, layers, row_bytes) for name in KINDS]
    bench.write(kinds=found, transparent_huge_pages=huge_pages_setting())


def rates(bench: Bench, name: str, num_layers: int, row_bytes: int) -> dict[str, Any]:
    """Seconds to take, fill and pin one kind of memory, and the rates at which it is read."""
    take, register = KINDS[name]
    begin = time.perf_counter()
    layers = [take(EXPERTS, row_bytes) for _ in range(num_layers)]
    block = np.random.default_rng(0).integers(0, 256, row_bytes, dtype=np.uint8)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda layer: _fill(layer.numpy(), block), layers))
    filled = time.perf_counter()
    pinned = Pinned(layers, None) if register and not bench.dry else None
    found: dict[str, Any] = {
        "kind": name,
        "fill_s": filled - begin,
        "pin_s": time.perf_counter() - filled,
    }
    target = torch.empty(EXPERTS, row_bytes, dtype=torch.uint8, device=bench.device)
    if not bench.dry:
        copies = [lambda layer=layer: target.copy_(layer, non_blocking=True) for layer in layers]
        found["copy_gb_s"] = EXPERTS * row_bytes / graph_us(copies) / 1e3
    for num in GATHERED:
        for config in bench.candidates(CONFIGS):
            found[f"gather {num} {config}"] = _gather_rate(bench, layers, target, num, config)
    print(found, flush=True)
    if pinned is not None:
        pinned.release()
    return found


def _gather_rate(
    bench: Bench, layers: list[Tensor], target: Tensor, num: int, config: GatherConfig
) -> float | None:
    """GB/s over random experts of every layer in turn."""
    experts = [torch.randperm(EXPERTS)[:num].int().to(bench.device) for _ in layers]
    slots = torch.arange(num, dtype=torch.int32, device=bench.device)
    count = torch.full((1,), num, dtype=torch.int32, device=bench.device)

    def call(layer: Tensor, chosen: Tensor) -> Callable[[], None]:
        return lambda: launch_gather(layer, target, chosen, slots, count, config)

    calls = [call(layer, chosen) for layer, chosen in zip(layers, experts, strict=True)]
    if bench.dry:
        calls[0]()
        return None
    return num * target.shape[1] / graph_us(calls) / 1e3


def _fill(rows: np.ndarray, block: np.ndarray) -> None:
    for place, row in enumerate(rows):
        row[:] = np.roll(block, 64 * place) if place < 8 else rows[place % 8]


def huge_pages_setting() -> str:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().strip() if setting.is_file() else "none"


if __name__ == "__main__":
    main()
