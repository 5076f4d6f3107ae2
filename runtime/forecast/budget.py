"""The budget: what memory a plan may take, and what fits into it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from residency.policies.errors import CapacityError, ConfigError
from residency.runtime.architecture import Architecture
from residency.runtime.memory import GIB, MemoryPlan, memory_plan, most_experts

CONTEXT_BYTES = GIB // 2  # of a GPU: CUDA's context, which is there when a running process plans
HOST_RESERVED_BYTES = GIB  # of host memory: Python, its libraries, and what is read while loading
SHARE = 10  # staging, or a chunk's workspace, may take one part in so many of the device's memory
CUTS = ((8, 3), (16, 3), (32, 2), (64, 2), (128, 2))  # groups and ring, the usual one first
LEAST_CHUNK = 512
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": GIB, "t": GIB << 10}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?b)?", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """Bytes that may be taken. device_bytes is None where the device is the host itself.
    told: for a report, where both numbers are from.
    """

    device_bytes: int | None
    host_bytes: int
    told: str = ""


@dataclass(frozen=True)
class Cut:
    """How prompts and staging are cut; None leaves a key to the plan."""

    groups: int | None = None
    ring: int | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Fitted:
    """A memory plan that fits, and how it cuts layers and prompts. free_bytes: for slots."""

    memory: MemoryPlan
    groups: int
    ring: int
    chunk_tokens: int
    free_bytes: int


def parse_size(text: str, option: str) -> int:
    """Bytes: "24GiB", "24G" and "24GB" alike count in powers of 1,024. Raises ConfigError,
    also without a unit: 24 is more likely meant as 24 GiB than as bytes.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{option}={text}: it must be a size with its unit, e.g. 24GiB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def fit(
    architecture: Architecture,
    budget: Budget,
    *,
    context: int,
    usual_chunk: int,
    dequantised_bytes: int,
    cut: Cut,
    slots: int | None = None,
    needs_slots: bool = True,
    shares: int = 1,
    batch: int = 1,
    snapshots: int = 0,
    state_bytes: int = 0,
) -> Fitted:
    """The plan with the most slots that fit, or with `slots` if they do; none where `needs_slots`
    is false. shares: equal parts of the slots. snapshots, state_bytes: as `memory_plan` has them.

    Raises CapacityError for what does not fit, with the numbers and the key to change.
    """
    space, row_bytes = architecture.space, architecture.layout.row_bytes
    _require_banks(architecture, budget)
    least = most_experts(space, batch) * shares if needs_slots else 0
    needed = max(least, slots or 0) if needs_slots else 0
    found: list[Fitted] = []
    for groups, ring, chunk in _cuts(space.num_experts, cut, usual_chunk, context):
        plan = memory_plan(
            architecture,
            num_slots=0,
            groups=groups,
            ring=ring,
            chunk_tokens=chunk,
            context=context,
            dequantised_bytes=dequantised_bytes,
            batch=batch,
            snapshots=snapshots,
            state_bytes=state_bytes,
            device=torch.device("cpu" if budget.device_bytes is None else "cuda"),
        )
        free = _free_for_slots(plan, budget)
        found.append(Fitted(plan, groups, ring, chunk, free))
        room = budget.device_bytes or budget.host_bytes
        slim = max(plan.staging_bytes, plan.workspace_bytes) * SHARE <= room
        if free >= needed * row_bytes and slim:
            break
    last = max(found, key=lambda one: one.free_bytes)
    chosen = found[-1] if found[-1].free_bytes >= needed * row_bytes else last
    if chosen.free_bytes < needed * row_bytes:
        raise CapacityError(_too_much(chosen.memory, budget, needed, chosen.free_bytes, context))
    number = min(chosen.free_bytes // row_bytes, space.num_ids) // shares * shares
    memory = replace(chosen.memory, num_slots=(slots or number) if needs_slots else 0)
    return replace(chosen, memory=memory)


def _cuts(num_experts: int, cut: Cut, usual_chunk: int, context: int) -> list[tuple[int, int, int]]:
    """Groups, ring and chunk: the usual ones first, then ones that take less and less."""
    pairs = [(cut.groups or g, cut.ring or r) for g, r in CUTS]
    pairs = [(min(g, num_experts), r) for g, r in pairs]
    chunks = [min(usual_chunk, context)]
    while chunks[-1] > LEAST_CHUNK:
        chunks.append(max(LEAST_CHUNK, chunks[-1] // 2))
    if cut.chunk_tokens is not None:
        chunks = [cut.chunk_tokens]
    steps = max(len(pairs), len(chunks))
    pairs += pairs[-1:] * (steps - len(pairs))
    chunks += chunks[-1:] * (steps - len(chunks))
    return [(*pair, chunk) for pair, chunk in zip(pairs, chunks, strict=True)]


def _free_for_slots(plan: MemoryPlan, budget: Budget) -> int:
    """Bytes; below 0 where not even the rest fits."""
    if budget.device_bytes is not None:
        return budget.device_bytes - CONTEXT_BYTES - plan.device_bytes
    return budget.host_bytes - HOST_RESERVED_BYTES - plan.bank_bytes - plan.device_bytes


def _require_banks(architecture: Architecture, budget: Budget) -> None:
    banks = architecture.space.num_ids * architecture.layout.row_bytes
    free = budget.host_bytes - HOST_RESERVED_BYTES
    if banks <= free:
        return
    mend = "add memory (--host-memory), or choose a smaller or a quantised model"
    if hasattr(architecture.config, "quantization_config") or architecture.quantization:
        mend = "add memory (--host-memory), or choose a smaller model"
    raise CapacityError(
        f"host memory: all experts take {banks / GIB:.2f} GiB, and of "
        f"{budget.host_bytes / GIB:.2f} GiB {max(free, 0) / GIB:.2f} GiB are left after a "
        f"reserve of {HOST_RESERVED_BYTES / GIB:.2f} GiB; {mend}"
    )


def _too_much(plan: MemoryPlan, budget: Budget, least: int, free: int, context: int) -> str:
    needed = least * plan.row_bytes
    parts = {
        "weights": plan.weight_bytes,
        f"KV of {context:,} tokens": plan.kv_bytes,
        "workspace": plan.workspace_bytes,
        "staging": plan.staging_bytes,
        "snapshots": plan.snapshot_bytes,
        "policy state": plan.policy_bytes,
        "graphs": plan.graph_bytes,
        f"{least} slots": needed,
    }
    if budget.device_bytes is None:
        where, room, reserve = "host memory", budget.host_bytes, HOST_RESERVED_BYTES
        parts = {"banks": plan.bank_bytes, **parts}
    else:
        where, room, reserve = "GPU memory", budget.device_bytes, CONTEXT_BYTES + plan.reserve_bytes
    told = " + ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items() if size)
    keys = {
        f"model.context={max(context // 2, 1)}": plan.kv_bytes + plan.workspace_bytes,
        "cache.slots": needed if least > plan.staging_rows else 0,
        "prefill.groups (more of them)": plan.staging_bytes,
    }
    largest = max(keys, key=lambda key: keys[key])
    weights = plan.weight_bytes + reserve > room
    mend = "a model with fewer other weights, or model.layers" if weights else f"lower {largest}"
    mend = mend.replace("lower prefill.groups", "prefill.groups")
    return (
        f"{where}: {(room - free + needed) / GIB:.2f} GiB needed, {room / GIB:.2f} GiB there "
        f"({told} + reserve {reserve / GIB:.2f} GiB); {mend}"
    )
