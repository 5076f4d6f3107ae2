"""What the executor shows a prefill mode of each layer: masks, and what was learnt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from residency.policies.prefill import LayerView
from residency.policies.step import Phase, Step
from residency.runtime.lanes import Reading
from residency.runtime.learning import Learning
from residency.runtime.slots import SlotPool


class Views:
    """The views of one chunk's layers, before their routers have spoken and behind that."""

    def __init__(self, learning: Learning, host_layers: Collection[int] = ()) -> None:
        """host_layers: those whose slots decode does not read."""
        self._learning = learning
        self.host_layers = host_layers

    def begin(self, maps: SlotPool, token: torch.Tensor, num_tokens: int, promoted: int) -> None:
        """maps: on the host. token, promoted: as `PrefillExecutor.begin` has them."""
        self._maps = maps
        self._token = token
        self._num_tokens = num_tokens
        self._promoted = promoted
        self._view: LayerView | None = None
        self._guess: Reading | None = None

    def guessed(self, layer: int, guess: Reading | None) -> None:
        """guess: routes of `layer` on their way, int64 [T, K]; None if its router was not asked."""
        self._guess = guess

    def before(self, layer: int) -> LayerView:
        """Of a layer whose router has not spoken."""
        guessed = None
        if self._guess is not None:
            ids = self._guess.value().flatten()
            guessed = torch.bincount(ids, minlength=self._maps.space.num_experts)
            self._guess = None
        alone = self._maps.has_shares
        self._view = LayerView(
            layer=layer,
            num_tokens=self._num_tokens,
            resident=self._maps.layer_slots(layer) >= 0,
            welcome=self._welcome(layer),
            guessed=guessed,
            num_sharing=1 if alone else self._maps.space.num_layers - layer,
            num_slots=self._maps.share_size,
            num_empty=self._maps.num_empty(layer) if self._learning.learns else 0,
        )
        self._view = self._learning.told(self._view, alone=alone)
        return self._view

    def behind(
        self, ids_TK: torch.Tensor, routed: torch.Tensor, landed: Sequence[int]
    ) -> LayerView:
        """Of the same layer once its routes are known, int64 [T, K] on the host, and as a mask."""
        assert self._view is not None, "a layer is planned before its router has spoken"
        welcome = self._view.welcome
        if self._promoted < len(ids_TK):
            welcome = welcome & self.mask(ids_TK[len(ids_TK) - self._promoted :])
        on_the_way = torch.zeros_like(routed)
        on_the_way[landed] = True
        return replace(self._view, routed=routed, landed=on_the_way, welcome=welcome)

    def _welcome(self, layer: int) -> torch.Tensor:
        num_experts = self._maps.space.num_experts
        may_enter = layer not in self.host_layers and self._promoted > 0
        welcome = torch.full((num_experts,), may_enter)
        step = Step(self._token, layer, Phase.PREFILL)
        if may_enter and self._maps.may_decline(step):
            first = layer * num_experts
            admitted = self._maps.welcomes(torch.arange(first, first + num_experts), step)
            assert admitted is not None, "a policy may decline in a phase, or not"
            welcome &= admitted
        return welcome

    def mask(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [E] of ids on the host."""
        mask = np.zeros(self._maps.space.num_experts, dtype=bool)
        mask[ids.numpy().ravel()] = True
        return torch.from_numpy(mask)
