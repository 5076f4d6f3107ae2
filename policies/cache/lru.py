"""lru: the expert whose last reference lies furthest back is evicted first."""

from __future__ import annotations

import torch

from residency.policies.cache.base import CachePolicy
from residency.policies.step import Step


class Lru(CachePolicy):
    """Key = time of the last reference, counted in MoE layers: token * num_layers + layer."""

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        self.keys[ids] = step.token * self.space.num_layers + step.layer
