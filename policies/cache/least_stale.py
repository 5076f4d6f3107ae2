"""least_stale: experts that the pass in flight has gone past without using them are evicted first.

Layers run in a fixed order, so an expert of a layer that this pass has left behind is not needed
before the next pass, while one of a layer still ahead may be needed soon: evicting the latter is
what least recently used does when the slots hold less than a pass.

After the least-stale rule of D. Hoang, A. Jaiswal, M. Samragh and M. Cho, "SpecMD: a comprehensive
study on speculative expert prefetching", arXiv 2602.03921, 2026. It was written from that work's
idea, not from its code: the order within each class below is ours, and no figure of theirs was
reproduced with it.
"""

from __future__ import annotations

import torch

from residency.policies.cache.base import CachePolicy
from residency.policies.step import IdSpace, Step

TOKEN_BITS = 40  # of a key, for the pass of the last use
CLASS_BIT = 56  # above it the class, between the two the layer
PASSED, AHEAD, USED = 0, 1, 2


class LeastStale(CachePolicy):
    """Key = (class, layer from the last to the first, pass of the last use).

    A pass is one step through all layers.

    Classes, first to be evicted first: PASSED, not used in this pass, whose routes in its layer are
    known; AHEAD, its layer is still to come; USED in this pass. Within a class
    the layer that will be reached last goes first, which is the highest one, and of its experts the
    one whose last use is oldest.
    """

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        assert space.num_layers < 1 << (CLASS_BIT - TOKEN_BITS), "layers fit their part of a key"
        behind = space.num_layers - 1 - torch.arange(space.num_layers, device=device)
        self.keys[: space.num_ids] = behind.repeat_interleave(space.num_experts) << TOKEN_BITS

    def refresh(self, step: Step) -> None:
        """A pass begins: every layer lies ahead but the first, whose routes come next."""
        self._classify(self.keys, AHEAD)
        self._classify(self._keys_of(0), PASSED)

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        """What the next layer's routes hit is protected while it is admitted, so the others of that
        layer may count as passed from now on.
        """
        self._classify(self._keys_of(step.layer + 1), PASSED)
        behind = self.space.num_layers - 1 - step.layer
        self.keys[ids] = ((USED << CLASS_BIT) | (behind << TOKEN_BITS)) + step.token

    def _keys_of(self, layer: int) -> torch.Tensor:
        """int64 [E] view, empty behind the last layer."""
        first = layer * self.space.num_experts
        return self.keys[first : min(first + self.space.num_experts, self.space.num_ids)]

    def _classify(self, keys: torch.Tensor, to: int) -> None:
        keys.bitwise_and_((1 << CLASS_BIT) - 1).bitwise_or_(to << CLASS_BIT)
