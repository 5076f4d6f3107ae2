"""Routing: replaces the routes a model's routers choose, for measuring with made-up weights."""

from __future__ import annotations

from typing import Protocol

import torch

from residency.policies.step import Step


class Routing(Protocol):
    """Where each token goes, instead of where the model's router sends it."""

    def routes(self, step: Step, ids_TK: torch.Tensor) -> torch.Tensor:
        """int64 [T, K] experts of the step's tokens, distinct within a token.

        Runs inside captured graphs: fixed shapes, no host synchronisation. step.token is the index
        of the last of the T tokens.
        """
