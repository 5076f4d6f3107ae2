"""cpu: decode computes every routed expert on the host, in the bank where it lies.

Activations cross the link instead of weights. The slots are not used, so the combination wants
cache=none.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from residency.policies.decode.base import DecodeTarget
from residency.policies.step import Step


class Cpu(DecodeTarget):
    """Computes where the experts lie; nothing is fetched or admitted."""

    computes_on_host: ClassVar[bool] = True

    def on_host(self, ids: torch.Tensor, resident: torch.Tensor, step: Step) -> torch.Tensor:
        return torch.ones_like(ids, dtype=torch.bool)
