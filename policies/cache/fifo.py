"""fifo: the expert that entered its slot first is evicted first, however often it was used since.

What a slot pool does that keeps no history at all; the floor that any use of history has to beat.
"""

from __future__ import annotations

import torch

from residency.policies.cache.base import CachePolicy
from residency.policies.step import Step


class Fifo(CachePolicy):
    """Key = number of the admission by which the expert last entered a slot; 0 before any.

    Experts that entered together are evicted in ascending order of their ids.
    """

    follows_moves = True

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        """A use changes nothing."""

    def moved(self, entered: torch.Tensor, evicted: torch.Tensor) -> None:
        self.keys[entered] = self.keys[: self.space.num_ids].max() + 1
