"""cuda: the slots lie on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from residency.policies.base import Conflict
from residency.runtime.devices.base import Device


class CudaDevice(Device):
    """One GPU, by index. Refused where it is not there."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Device.Config):
        """index: which GPU, as CUDA counts them.
        kernels: compute experts by the project's kernels; false takes their plain torch definition.
        allow_pageable: run even if host memory cannot be pinned, more slowly and without kernels.
        """

        index: int = 0
        kernels: bool = True
        allow_pageable: bool = False

    config: Config

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        count = torch.cuda.device_count()
        if not 0 <= self.config.index < count:
            what = f"torch {torch.__version__} sees {count} CUDA devices here"
            key = "device=cuda" if self.config.index == 0 else f"device.index={self.config.index}"
            yield Conflict((key,), what, "device=cpu" if count == 0 else "device.index=0")

    def engine_options(self) -> dict[str, bool]:
        return {
            "kernels": self.config.kernels,
            "allow_pageable": self.config.allow_pageable,
        }

    def resolve(self) -> torch.device:
        return torch.device("cuda", self.config.index)
