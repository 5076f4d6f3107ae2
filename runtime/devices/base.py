"""The device interface: a config option that resolves to one torch device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from residency.policies.base import Conflict, Part

MAX_THREADS = 1024


class Device(Part, ABC):
    """The device that has slots, staging and all weights but the experts."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """threads: CPU threads that torch may use; 0 leaves torch's own choice."""

        threads: int = 0

    group: ClassVar[str] = "device"
    config: Config

    def faults(self) -> Iterator[Conflict]:
        if not 0 <= self.config.threads <= MAX_THREADS:
            key, reason = f"device.threads={self.config.threads}", f"it is 0 to {MAX_THREADS}"
            yield Conflict((key,), reason, "device.threads=0")

    def open(self) -> torch.device:
        """The torch device, ready for use; sets the number of CPU threads of this process."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        return self.resolve()

    @abstractmethod
    def resolve(self) -> torch.device:
        """The torch device that this option stands for."""

    def engine_options(self) -> dict[str, bool]:
        """Keyword arguments of `Engine` that this option sets."""
        return {}

    def notes(self) -> list[str]:
        """Lines for the report, where the option left a choice open."""
        return []
