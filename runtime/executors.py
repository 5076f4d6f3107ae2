"""What runs the experts of one phase, as the offload runtime sees it."""

from __future__ import annotations

from typing import Protocol

import torch

from residency.policies.step import Step
from residency.runtime.experts import Call


class Executor(Protocol):
    """Runs the experts of one layer in one phase."""

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """What the experts add: [T, H]."""


class Decoder(Executor, Protocol):
    """Runs the experts of decode steps."""

    def prepare(self) -> None:
        """The host's part, before a step: the device is done with the last one."""

    def finish(self) -> None:
        """The device's part, behind the last layer of a step; a graph may capture it."""
