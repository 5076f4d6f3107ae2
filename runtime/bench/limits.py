"""The limits of the machine, measured in the same run: the link's rate and all-resident times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from residency.policies.cache.lru import Lru
from residency.policies.decode.gpu import Gpu
from residency.policies.errors import CapacityError, WorkloadError
from residency.policies.prefill.always_stream import AlwaysStream
from residency.policies.prefill.demand import Demand
from residency.policies.step import IdSpace
from residency.runtime.bench.measure import Meter
from residency.runtime.bench.samples import Samples, Spread, spread_dict
from residency.runtime.engine import Engine
from residency.runtime.offload import Policies
from residency.runtime.routing import TableRouting

COPY_BYTES = {"cuda": 8 << 30, "cpu": 1 << 28}
ANY_LENGTH = 1 << 30


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second from banks into staging, in large copies with nothing else under way."""

    rate: Spread
    num_bytes: int  # copied in each repeat
    pinned: bool
    gather: Spread | None  # bytes per second of the kernel that decode's misses come by

    def as_dict(self) -> dict[str, Any]:
        return {
            "bytes_per_s": spread_dict(self.rate),
            "gather_bytes_per_s": spread_dict(self.gather),
            "bytes": self.num_bytes,
            "pinned": self.pinned,
        }


@dataclass(frozen=True)
class Resident:
    """Times with every expert in its slot. reason: why there are none, empty if there are."""

    prefill: tuple[Samples, ...] = ()
    decode: Samples | None = None
    reason: str = ""

    def compute_s(self, tokens: int) -> float | None:
        """The fastest time of a prompt of so many tokens."""
        found = [samples for samples in self.prefill if samples.tokens == tokens]
        return found[0].seconds.least if found else None

    @property
    def decode_s(self) -> float | None:
        """The fastest time per decoded token."""
        return None if self.decode is None else self.decode.per_token.least


@dataclass(frozen=True)
class Floor:
    """No plan that moves link_s worth of bytes beside compute_s can take less time.

    waits_s: copies start when the router has spoken. ahead_s: they run behind compute, all but the
    first group. own_s: the one of both that binds the plan measured.
    """

    link_s: float
    compute_s: float
    waits_s: float
    ahead_s: float
    own_s: float

    @classmethod
    def of(cls, link_s: float, compute_s: float, group_s: float, waits: bool) -> Floor:
        waits_s = link_s + compute_s
        ahead_s = max(link_s, compute_s) + min(group_s, link_s)
        return cls(link_s, compute_s, waits_s, ahead_s, waits_s if waits else ahead_s)


def link_rate(engine: Engine, repeats: int) -> LinkRate:
    """Copies as large as staging allows, around the real banks; slots keep what they hold."""
    plan, banks = engine.runtime.plan, engine.banks
    staging = engine.runtime.rows[plan.num_slots :]
    size = min(plan.staging_rows, banks.space.num_experts)
    wanted = min(COPY_BYTES.get(engine.device.type, 1 << 30), plan.bank_bytes)
    count = max(1, wanted // (size * plan.row_bytes))

    def copy() -> None:
        for i in range(count):
            bank = banks.layers[i % len(banks.layers)]
            staging[:size].copy_(bank[:size], non_blocking=True)

    copy()
    num_bytes = count * size * plan.row_bytes
    rates = [num_bytes / _seconds(copy, engine.device) for _ in range(repeats)]
    gather = _gather_rate(engine, repeats) if engine.runtime.capturable else None
    return LinkRate(Spread.of(rates), num_bytes, banks.layers[0].is_pinned(), gather)


def _gather_rate(engine: Engine, repeats: int) -> Spread:
    """Scattered experts of one layer after another into staging, as a decode step's misses come."""
    from residency.runtime.kernels.gather import launch_gather

    runtime, banks = engine.runtime, engine.banks
    size = min(runtime.plan.staging_rows, banks.space.num_experts)
    device = engine.device
    experts = torch.randperm(banks.space.num_experts, device=device)[:size].int()
    rows = torch.arange(size, device=device, dtype=torch.int32) + runtime.plan.num_slots
    number = torch.tensor([size], device=device, dtype=torch.int32)

    def gather() -> None:
        for bank in banks.layers:
            launch_gather(bank, runtime.rows, experts, rows, number)

    gather()
    num_bytes = len(banks.layers) * size * runtime.plan.row_bytes
    return Spread.of([num_bytes / _seconds(gather, device) for _ in range(repeats)])


def resident(engine: Engine, plan_of: Meter) -> Resident:
    """Times of the same prompts and decodes on the same banks, with a slot for every expert."""
    try:
        with everything_resident(engine):
            meter = Meter(engine, plan_of.plan)
            decode = meter.decode()
            prefill = tuple(meter.resident_prefill(n) for n in sorted(meter.plan.lengths))
            return Resident(prefill, decode)
    except (CapacityError, WorkloadError) as error:  # the second: too short a context to visit all
        return Resident(reason=f"not every expert could be loaded: {error}")


@contextmanager
def everything_resident(engine: Engine) -> Iterator[None]:
    """Inside, every expert lies in a slot. Raises CapacityError, or WorkloadError where the context
    is too short for a prompt that visits all.
    """
    with engine.reconfigured(_everything_resident(engine.policies)):
        _load_everything(engine)
        yield


def cover(space: IdSpace, device: torch.device) -> TableRouting:
    """Routes under which ceil(E / K) tokens visit every expert of every layer."""
    num_tokens = -(-space.num_experts // space.top_k)
    ids = torch.arange(num_tokens * space.top_k, device=device) % space.num_experts
    table_NLK = ids.view(num_tokens, 1, space.top_k).expand(-1, space.num_layers, -1)
    return TableRouting(table_NLK)


def _everything_resident(policies: Policies) -> Policies:
    """A slot for each expert; chunks and groups as before."""
    own = policies.prefill.config
    config = Demand.Config(
        chunk_tokens=own.chunk_tokens, groups=own.groups, ring=1, max_tokens=ANY_LENGTH
    )
    demand = Demand(config, AlwaysStream(AlwaysStream.Config()))
    return Policies(Lru(Lru.Config(slots="all")), demand, Gpu(Gpu.Config()))


def _load_everything(engine: Engine) -> None:
    """Admit all experts by a prompt that is routed to all of them."""
    runtime = engine.runtime
    routing, runtime.routing = runtime.routing, cover(runtime.banks.space, engine.device)
    try:
        num_tokens = -(-runtime.banks.space.num_experts // runtime.banks.space.top_k)
        engine.generate([0] * num_tokens, max_new_tokens=1, ignore_eos=True)
    finally:
        runtime.routing = routing


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
