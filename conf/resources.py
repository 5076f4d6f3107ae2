"""What `residency plan` plans with: the memory it may take, and the constants it predicts by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from residency.policies.errors import ConfigError
from residency.runtime.architecture import Architecture
from residency.runtime.devices import Device
from residency.runtime.environment import environment
from residency.runtime.forecast.budget import Budget, parse_size
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.decode import Unknown
from residency.runtime.forecast.machine_constants import machine_constants
from residency.runtime.forecast.measured import bench_constants, read_bench
from residency.runtime.free_memory import free_host_bytes
from residency.runtime.machine.profile import (
    MachineProfile,
    machine_path,
    read_machine,
    require_machine,
)
from residency.runtime.memory import GIB


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    words: Sequence[str]
    gpu_memory: str | None = None
    host_memory: str | None = None
    measured: Sequence[Path] = ()
    machine: Path | None = None


class Resources:
    """Of one question."""

    def __init__(self, asked: Asked, device: Device, architecture: Architecture) -> None:
        """Raises ConfigError for what cannot be read."""
        self.asked, self.device, self.architecture = asked, device, architecture
        self.on_gpu = self._on_gpu(device)
        self.budget = self._budget()

    def _on_gpu(self, device: Device) -> bool:
        if device.name == "cpu":
            if self.asked.gpu_memory is not None:
                raise ConfigError(
                    f"--gpu-memory {self.asked.gpu_memory}: with device=cpu there is no GPU; "
                    "leave one of both out"
                )
            return False
        return self.asked.gpu_memory is not None or torch.cuda.is_available()

    def _budget(self) -> Budget:
        host, told_host = free_host_bytes(), "free here"
        if self.asked.host_memory is not None:
            host, told_host = parse_size(self.asked.host_memory, "--host-memory"), "given"
        told = f"host memory {host / GIB:.1f} GiB ({told_host})"
        if not self.on_gpu:
            return Budget(None, host, told)
        if self.asked.gpu_memory is not None:
            device, told_device = parse_size(self.asked.gpu_memory, "--gpu-memory"), "given"
        else:
            device, told_device = torch.cuda.mem_get_info(self.device.resolve())[0], "free"
        return Budget(device, host, f"GPU memory {device / GIB:.1f} GiB ({told_device}), {told}")

    def constants(self) -> tuple[Constants | None, str]:
        """Or why there are none."""
        space, row_bytes = self.architecture.space, self.architecture.layout.row_bytes
        if self.asked.measured:
            results = [(str(folder), read_bench(folder)) for folder in self.asked.measured]
            return bench_constants(results, space, row_bytes), ""
        kind = "cuda" if self.on_gpu else "cpu"
        if self.asked.machine is not None:
            profile = require_machine(self.asked.machine, "--machine")
            if not str(profile.environment.get("device", "")).startswith(kind):
                raise ConfigError(
                    f"--machine {self.asked.machine}: it is of {profile.device_name}, device "
                    f"{profile.environment.get('device')}, and this plan is for device={kind}"
                )
        else:
            found = self._own_machine(kind)
            if found is None:
                return None, (
                    f"no {'GPU' if self.on_gpu else 'machine'} was measured here: run `residency "
                    "doctor` on the machine, or name its file with --machine or a bench of this "
                    "model with --measured"
                )
            profile = found
        try:
            return machine_constants(profile, self.architecture), ""
        except Unknown as why:
            return None, str(why)

    def _own_machine(self, kind: str) -> MachineProfile | None:
        if kind == "cuda" and not torch.cuda.is_available():
            return None
        device = torch.device("cpu") if kind == "cpu" else self.device.resolve()
        profile = read_machine(machine_path(environment(device)["device_name"]))
        if profile is None or not profile.environment.get("device", "").startswith(kind):
            return None
        return profile
