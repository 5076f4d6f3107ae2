"""What the kernels' benchmarks share: times of graph replays, floors, checks and result.json.

A time is the median over replays of a CUDA graph that holds many calls, so the host's launching is
left out. The calls go round over as much data as the L2 cache cannot keep. Beside each time stands
its floor: its bytes at the rate of a copy on the device, or its operations at the rate of a bf16
matrix product, both measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from residency.runtime.environment import environment

Call = Callable[[], object]
Config = TypeVar("Config")
REPEATS = 9
DRY_CALLS = 1
L2_TIMES = 3  # bytes that calls go round over, in sizes of the L2 cache
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


class Rates(NamedTuple):
    """What the device does a microsecond: bytes read and written, multiplications and additions."""

    copied_bytes: float
    operations: float

    def floor_us(self, num_bytes: float, operations: float) -> float:
        return max(num_bytes / self.copied_bytes, operations / self.operations)


class Bench:
    """One script's device and dtype, and the errors and times that it found.

    A dry run is of tiny sizes on the CPU, in Triton's interpreter, and has no times. Its dtype is
    fp32, for the interpreter multiplies bf16 matrices by their bit patterns.
    """

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self.kind = kind
        self.out: Path = options.out
        self.dry: bool = options.dry_run
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if self.dry != interpreted:
            raise SystemExit("TRITON_INTERPRET=1 has to be set for a dry run, and for no other")
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.dtype = torch.float32 if self.dry else torch.bfloat16
        self.errors: dict[str, float] = {}
        self.times: list[dict[str, Any]] = []
        torch.manual_seed(0)
        self.rates: Rates | None = None  # measured when first needed

    def normal(self, *size: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(mean, std)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """A matrix that keeps the size of what it is applied to."""
        return self.normal(outputs, inputs, std=inputs**-0.5)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, mean=1.0, std=0.2)

    def candidates(self, configs: Sequence[Config]) -> Sequence[Config]:
        """All of them; the first few in a dry run, as the interpreter is slow."""
        return configs[:DRY_CALLS] if self.dry else configs

    def copies(self, num_bytes: float) -> int:
        """Copies of data of this size that the L2 cache cannot keep."""
        if self.dry:
            return DRY_CALLS
        cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(2, int(L2_TIMES * cache / num_bytes) + 1)

    def check(self, name: str, got: Tensor, want: Tensor, limit: float | None = None) -> None:
        """Keep the largest relative error under a name; `want` is of higher precision, or a
        limit is given.
        """
        want = want.double()
        error = float((got.double() - want).norm() / want.norm())
        limit = limit or TOLERANCE[self.dtype]
        if not error < limit:  # NaN is not
            raise SystemExit(f"{name}: relative error {error:.1e}, allowed {limit:.0e}")
        self.errors[name] = max(error, self.errors.get(name, 0.0))

    def time(
        self, kernel: str, calls: Sequence[Call], num_bytes: float, work: float = 0.0, **about: Any
    ) -> None:
        """Add the time of one of `calls`, which move so many bytes and do so many operations."""
        if self.dry:
            for call in calls[:DRY_CALLS]:
                call()
            spent = floor = None
        else:
            self.rates = self.rates or measured_rates()
            spent = round(graph_us(calls), 2)
            floor = round(self.rates.floor_us(num_bytes, work), 2)
        about = {name: as_json(value) for name, value in about.items()}
        self.times.append({"kernel": kernel, **about, "us": spent, "floor_us": floor})
        print(self.times[-1], flush=True)

    def write(self, **more: Any) -> None:
        """result.json, with whatever else a script measured."""
        result = {
            "kind": self.kind,
            "dry_run": self.dry,
            "rates_per_us": None if self.rates is None else self.rates._asdict(),
            "errors": self.errors,
            "times": self.times,
            **more,
            "environment": environment(self.device) | {"triton": version("triton")},
        }
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    found = argparse.ArgumentParser(description=about)
    found.add_argument("--out", type=Path, required=True, help="where result.json goes")
    found.add_argument(
        "--dry-run", action="store_true", help="tiny sizes, no times; needs TRITON_INTERPRET=1"
    )
    return found


def graph_us(calls: Sequence[Call]) -> float:
    """Median device time of one of `calls`, all of them captured into one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def measured_rates() -> Rates:
    data = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(data)
    copied = 2 * data.nbytes / graph_us([lambda: target.copy_(data)] * 4)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    return Rates(copied, 2 * 8192**3 / graph_us([lambda: a @ b] * 4))


def as_json(value: Any) -> Any:
    """Named tuples, also in one another, as dicts."""
    if not hasattr(value, "_asdict"):
        return value
    return {name: as_json(part) for name, part in value._asdict().items()}
