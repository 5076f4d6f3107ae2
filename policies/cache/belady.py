"""belady: the expert that is needed again last is evicted first; only a recorded run tells which.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966. No rule that brings every miss into a slot misses less.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from residency.policies.base import Capability, Need
from residency.policies.cache.base import NEEDS_SLOT_DECODE, CachePolicy
from residency.policies.step import IdSpace, Step

NEVER = (1 << 62) - 1


class Belady(CachePolicy):
    """Key = minus the time of the next reference, in MoE layers: token * num_layers + layer.

    `foresee` tells the future once; what it does not name is never needed again.
    """

    needs: ClassVar[tuple[Need, ...]] = (
        NEEDS_SLOT_DECODE,
        Need(
            Capability.KNOWS_FUTURE,
            because="it evicts the expert that is needed again last, which only the replay of a "
            "recorded run can tell",
            mend="cache=lru",
        ),
    )

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        self._tell(torch.empty(0, dtype=torch.int64, device=device), span=1)

    def foresee(self, routes_NLK: torch.Tensor, first_token: int = 0) -> None:
        """Learn the routes of a whole run, which is about to begin.

        routes_NLK: integer ids within the layer, negative for none; token i of the engine's clock
        is row i - first_token. Replaces what was foreseen before.
        """
        tokens_N = torch.arange(len(routes_NLK), device=self.keys.device) + first_token
        offsets_L = torch.arange(self.space.num_layers, device=self.keys.device)
        routes_NLK = routes_NLK.to(self.keys.device).long()
        ids_NLK = routes_NLK + offsets_L[:, None] * self.space.num_experts
        span = first_token + len(routes_NLK) + 1
        references_NLK = ids_NLK * span + tokens_N[:, None, None]
        self._tell(references_NLK[routes_NLK >= 0].sort().values, span)

    def foresee_steps(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """The same by global ids, int64 [R], and the clock of the step that needs each, int64 [R]:
        the tokens of a chunk share one.
        """
        span = int(tokens.max()) + 2
        self._tell((ids * span + tokens).sort().values, span)

    def _tell(self, references: torch.Tensor, span: int) -> None:
        """references: int64, ascending: id * span + token. Behind them lies one of no id."""
        nobody = references.new_full((1,), NEVER)
        # A row of its own, so that its length is never taken for the number of ids.
        self._references_1R, self._span = torch.cat([references, nobody])[None], span

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        """The next reference of each id after `step.token`, found by bisection."""
        begin = ids * self._span
        after = begin + step.token.clamp(max=self._span - 2) + 1
        references = self._references_1R[0]
        found = references[torch.searchsorted(references, after)] - begin
        time = found * self.space.num_layers + ids // self.space.num_experts
        self.keys[ids] = -torch.where(found < self._span, time, NEVER)
