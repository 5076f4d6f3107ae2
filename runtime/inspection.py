"""Inspection: what a model takes and what pool a device's memory affords, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from residency.policies.prefill import PrefillMode
from residency.runtime.architecture import Architecture
from residency.runtime.memory import GIB, RESERVE_BYTES, memory_plan
from residency.runtime.models import Model

DEVICE_SIZES = (8, 12, 16, 24, 32, 48, 80)  # GiB
RESERVED_BYTES = RESERVE_BYTES  # of a device
USUAL_CONTEXT = 8192


@dataclass(frozen=True)
class Pool:
    """What a device of memory_bytes affords.

    slots: after all else; 0 where one step's experts do not fit. share: of all experts.
    cycles: slots over the experts that one token touches in all layers.
    """

    device: str
    memory_bytes: int
    slots: int
    share: float
    cycles: float


@dataclass(frozen=True)
class Inspection:
    """A model's sizes. Bytes; expert_bytes is a bank's row, its alignment included.

    format_source: what says how the experts are stored. cycle: experts one token touches.
    weight_bytes: all that is not experts, dequantised_bytes of that from quantised tensors.
    graph_bytes: captured decode steps' own. policy_bytes: the maps of slots, under no policy.
    fixed_bytes: of a device, whatever the pool: weights, staging, KV, workspace, graphs, policy and
    reserve.
    """

    model: str
    model_type: str
    dtype: str
    moe_layers: int
    dense_layers: int
    experts: int
    top_k: int
    shared_experts: int
    cycle: int
    format: str
    format_source: str
    made_up: bool
    expert_bytes: int
    layer_bytes: int
    bank_bytes: int
    weight_bytes: int
    dequantised_bytes: int
    kv_bytes_per_token: int
    context: int
    staging_bytes: int
    kv_bytes: int
    workspace_bytes: int
    graph_bytes: int
    policy_bytes: int
    reserved_bytes: int
    fixed_bytes: int
    pools: tuple[Pool, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_model(model: Model, prefill: PrefillMode) -> Inspection:
    """From config and headers alone. Raises CheckpointError or ConfigError."""
    architecture, weights = model.architecture, model.weights()
    space, config = architecture.space, architecture.config.get_text_config()
    context = model.config.context or min(architecture.max_context, USUAL_CONTEXT)
    plan = memory_plan(
        architecture,
        num_slots=0,
        groups=min(prefill.config.groups, space.num_experts),
        ring=prefill.config.ring,
        chunk_tokens=prefill.config.chunk_tokens,
        context=context,
        dequantised_bytes=weights.dequantised_bytes,
        device=torch.device("cuda"),
    )
    return Inspection(
        model=architecture.source,
        model_type=architecture.config.model_type,
        dtype=str(architecture.dtype).removeprefix("torch."),
        moe_layers=space.num_layers,
        dense_layers=config.num_hidden_layers - space.num_layers,
        experts=space.num_experts,
        top_k=space.top_k,
        shared_experts=_shared_experts(architecture),
        cycle=space.num_layers * space.top_k,
        format=architecture.format.name,
        format_source=architecture.format_source,
        made_up=weights.made_up,
        expert_bytes=plan.row_bytes,
        layer_bytes=space.num_experts * plan.row_bytes,
        bank_bytes=plan.bank_bytes,
        weight_bytes=plan.weight_bytes,
        dequantised_bytes=plan.dequantised_bytes,
        kv_bytes_per_token=architecture.cache_bytes(2) - architecture.cache_bytes(1),
        context=context,
        staging_bytes=plan.staging_bytes,
        kv_bytes=plan.kv_bytes,
        workspace_bytes=plan.workspace_bytes,
        graph_bytes=plan.graph_bytes,
        policy_bytes=plan.policy_bytes,
        reserved_bytes=plan.reserve_bytes,
        fixed_bytes=plan.device_bytes,
        pools=tuple(_pool(*device, architecture, plan.device_bytes) for device in _devices()),
    )


def _devices() -> Sequence[tuple[str, int]]:
    """Names and memory of usual devices, and of this machine's."""
    own = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    here = {f"this machine's {p.name}": p.total_memory for p in own}
    return [*((f"{size} GB", size * GIB) for size in DEVICE_SIZES), *here.items()]


def _pool(device: str, memory: int, architecture: Architecture, fixed: int) -> Pool:
    space = architecture.space
    slots = min((memory - fixed) // architecture.layout.row_bytes, space.num_ids)
    if slots < space.top_k:
        slots = 0
    cycle = space.num_layers * space.top_k
    return Pool(device, memory, slots, slots / space.num_ids, slots / cycle)


def _shared_experts(architecture: Architecture) -> int:
    """Experts that every token of a MoE layer passes; some models join them in one module."""
    block = architecture.expert_modules[0].rpartition(".")[0]
    names = {name for name, _ in architecture.skeleton.get_submodule(block).named_children()}
    if names.isdisjoint({"shared_expert", "shared_experts", "shared_mlp"}):
        return 0
    config = architecture.config.get_text_config()
    counts = (getattr(config, key, None) for key in ("n_shared_experts", "num_shared_experts"))
    return next((int(count) for count in counts if count), 1)
