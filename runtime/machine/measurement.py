"""A measurement: one quantity of the machine, named, in a unit, over several repeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from residency.runtime.bench.samples import Spread

BYTES_S, OPERATIONS_S, SECONDS = "bytes/s", "operations/s", "s"
UNITS = (BYTES_S, OPERATIONS_S, SECONDS)

# Names of measurements that others read. docs/planning.md says how each is taken.
LINK, LINK_BUSY, LINK_PAGEABLE = "link", "link, CPU busy", "link, pageable"
GATHER_ONE, GATHER_EIGHT, GATHER = "gather of 1", "gather of 8", "gather of 64"
GATHER_BUSY = "gather of 64, CPU busy"
DEVICE_COPY = "device copy"
GEMM_BF16, GEMM_FP32 = "matrix product, bf16", "matrix product, fp32"
HOST_READ = "host memory read"
HOST_EXPERTS, BESIDE = "host experts", "beside the link"
HOST_TURN = "host turn"
PIN = "pinning"
GRAPH_KERNEL = "kernel in a graph"
CHUNK_LAYER, DECODE_LAYER = "layer of a chunk", "layer of a decode step"


@dataclass(frozen=True)
class Measurement:
    """what: what was done, for a table. A rate where unit has "/s", else a time."""

    name: str
    what: str
    unit: str
    spread: Spread
    repeats: int

    @classmethod
    def of(cls, name: str, what: str, unit: str, values: list[float]) -> Measurement:
        return cls(name, what, unit, Spread.of(values), len(values))

    @property
    def value(self) -> float:
        return self.spread.median

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Measurement:
        """Raises KeyError, TypeError or ValueError for what `as_dict` cannot have given."""
        spread = Spread(**{key: float(found["spread"][key]) for key in ("median", "least", "most")})
        if not 0 < spread.least <= spread.median <= spread.most < 1e18:
            raise ValueError(f"{spread} is no spread of rates or times")
        if found["unit"] not in UNITS:
            raise ValueError(f"{found['unit']} is no unit")
        return cls(
            str(found["name"]), str(found["what"]), found["unit"], spread, int(found["repeats"])
        )


def host_experts(form: str, *, beside: bool = False) -> str:
    """The name of the rate at which the host computes experts of a format."""
    return f"{HOST_EXPERTS}, {form}" + (f", {BESIDE}" if beside else "")


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the work took, on the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return max(time.perf_counter() - start, 1e-9)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return max(float(begin.elapsed_time(end)) / 1e3, 1e-9)


def rates(
    work: Callable[[], object], amount: float, device: torch.device, repeats: int
) -> list[float]:
    """Amount a second of each repeat, behind one run that is not timed."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [amount / seconds(work, device) for _ in range(repeats)]
