"""What a policy is told: the space of expert ids, and the step in flight."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class IdSpace:
    """Global expert ids: `layer * num_experts + expert`, layers counted over MoE layers only."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def num_ids(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def sink(self) -> int:
        """The id that pads id lists to a fixed shape; its row of state tensors is never read."""
        return self.num_ids


@dataclass(frozen=True)
class Step:
    """One pass through one MoE layer.

    token: int64 scalar tensor on the policy's device, the index of the step's last token, counted
    over the whole life of the engine. All experts routed to in one step share it.
    """

    token: torch.Tensor
    layer: int
    phase: Phase
