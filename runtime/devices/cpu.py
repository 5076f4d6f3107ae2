"""cpu: the slots are plain memory and copies are memcpy."""

from __future__ import annotations

import torch

from residency.runtime.devices.base import Device


class CpuDevice(Device):
    """The host itself; decode=gpu then means slots in host memory."""

    def resolve(self) -> torch.device:
        return torch.device("cpu")
