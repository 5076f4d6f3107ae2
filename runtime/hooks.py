"""The seam to transformers: an experts implementation that hands every call to a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from residency.policies.errors import CheckpointError
from residency.runtime.experts import Call
from residency.runtime.offload import OffloadRuntime

NAME = "residency"


class ExpertsHandle:
    """Ties one experts module to its MoE layer's ordinal in a runtime."""

    def __init__(self, runtime: OffloadRuntime, layer: int) -> None:
        self.runtime = runtime
        self.layer = layer


def attach(model: PreTrainedModel, expert_modules: Sequence[str], runtime: OffloadRuntime) -> None:
    """Let `runtime` compute the experts of `model`. `expert_modules` are in MoE layer order."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    for layer, name in enumerate(expert_modules):
        module: Any = model.get_submodule(name)
        if not getattr(module, "is_concatenated", True) and not hasattr(module, "_apply_gate"):
            raise CheckpointError(f"{name}: interleaved experts without a gate of their own")
        if getattr(module, "has_post_expert_norm", False):
            raise CheckpointError(f"{name}: experts with a norm behind each expert cannot be run")
        module.residency = ExpertsHandle(runtime, layer)
    model.set_experts_implementation(NAME)


def detach(model: PreTrainedModel, expert_modules: Sequence[str]) -> None:
    """Untie the model's experts from their runtime."""
    for name in expert_modules:
        del model.get_submodule(name).residency


def _experts_forward(
    module: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    handle: ExpertsHandle = module.residency
    return handle.runtime.layer(handle.layer, Call(module, x_TH, ids_TK, weights_TK))


def add_experts(
    module: Any,
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    residual_TH: torch.Tensor,
) -> torch.Tensor:
    """The experts' sum and the residual [T, H], for layers that leave the addition to kernels."""
    handle: ExpertsHandle = module.residency
    return handle.runtime.layer(handle.layer, Call(module, x_TH, ids_TK, weights_TK, residual_TH))
