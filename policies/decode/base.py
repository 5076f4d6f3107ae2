"""The decode target interface: which routed experts are fetched, and which the host computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from residency.policies.base import Part
from residency.policies.step import Step


class DecodeTarget(Part, ABC):
    """Splits the routed experts of one decode step between the device's slots and the host."""

    group: ClassVar[str] = "decode"
    computes_on_host: ClassVar[bool] = False  # whether `on_host` ever names an expert

    @abstractmethod
    def on_host(self, ids: torch.Tensor, resident: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Which of `ids` the host computes where they lie: bool [N], or None for none of them.

        ids: int64 [N] global ids in the order of the step's (token, choice) pairs, repeats
        possible; resident: bool [N], whether each lies in a slot. Whether the answer is None may
        not depend on tensor values. Experts that are not computed on the host are read from slots,
        and fetched first if they are missing.
        """
