"""auto: the first NVIDIA GPU where there is one, else the CPU. The report names which it was."""

from __future__ import annotations

import torch

from residency.runtime.devices.base import Device


class Auto(Device):
    """Asks torch which device there is."""

    def resolve(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def notes(self) -> list[str]:
        return [f"device=auto took {self.resolve()}"]
