"""Facts: what the machine is, as the system tells it. Nothing is timed."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from residency.runtime.free_memory import free_host_bytes
from residency.runtime.host_experts.build import BuildError
from residency.runtime.host_experts.native import Library

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
WANTED = ("torch", "transformers")  # packages whose versions decide what works


@dataclass(frozen=True)
class Facts:
    """Bytes; None for what the system does not tell.

    cpus: given to this process. cgroup_bytes: the limit of its group below the whole memory.
    memlock_bytes: what it may pin, None for any amount. unsupported: packages of a version that
    this project is not made for. load: threads that wanted a CPU over the last minute, before
    anything was measured. library: why experts on the host have no native form, or "".
    gpu_numa_node: the node that the GPU hangs on, of numa_nodes. near_cpus: of `cpus`, those on it.
    pcie_generation, pcie_lanes: what GPU and slot can do together; pcie_lanes_now: what runs.
    """

    device_type: str
    cpus: int
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    free_bytes: int
    cgroup_bytes: int | None
    memlock_bytes: int | None
    huge_pages: str
    wsl: bool
    numa_nodes: int
    library: str
    triton: str | None
    unsupported: tuple[str, ...]
    load: float = 0.0
    driver: str | None = None
    gpu_bytes: int | None = None
    gpu_free_bytes: int | None = None
    gpu_numa_node: int | None = None
    near_cpus: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    pcie_lanes_now: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Facts:
        """Raises TypeError for what `as_dict` cannot have given."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in found.items()
        }
        return cls(**{key: value for key, value in values.items() if key in known})


def facts_of(device: torch.device) -> Facts:
    load, memory = os.getloadavg()[0], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    common: dict[str, Any] = dict(
        device_type=device.type,
        cpus=len(os.sched_getaffinity(0)),
        cpu_flags=_cpu_flags(),
        memory_bytes=memory,
        free_bytes=free_host_bytes(),
        cgroup_bytes=cgroup_bytes(memory),
        memlock_bytes=_memlock(),
        huge_pages=_read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown",
        wsl="microsoft" in (_read("/proc/sys/kernel/osrelease") or "").lower(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        library=_library(),
        triton=_version("triton"),
        unsupported=unsupported(),
        load=load,
    )
    return Facts(**common, **(_gpu(device) if device.type == "cuda" else {}))


def cgroup_bytes(memory: int) -> int | None:
    """The limit of the process's control group, where it is below `memory`."""
    for name in CGROUPS:
        text = _read(name)
        if text is not None and text.isdecimal() and int(text) < memory:
            return int(text)
    return None


def unsupported(installed: dict[str, str] | None = None) -> tuple[str, ...]:
    """Packages whose version this project does not ask for, each with what it asks for."""
    found = []
    try:
        needs = [Requirement(text) for text in requires("residency") or []]
    except PackageNotFoundError:
        return ()
    for need in needs:
        own = (installed or {}).get(need.name) or _version(need.name)
        if need.name not in WANTED or own is None:
            continue
        if not need.specifier.contains(own.partition("+")[0], prereleases=True):
            found.append(f"{need.name} {own} ({need.specifier} is supported)")
    return tuple(found)


def _gpu(device: torch.device) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(device)
    found: dict[str, Any] = dict(gpu_bytes=total, gpu_free_bytes=free, driver=_driver())
    folder = _pci_folder(device)
    if folder is None:
        return found
    node = _number(folder / "numa_node")
    lanes, lanes_now = (_number(folder / f"{w}_link_width") for w in ("max", "current"))
    found |= dict(pcie_lanes=lanes, pcie_lanes_now=lanes_now)
    found["pcie_generation"] = generation_of(_read(folder / "max_link_speed"))
    if node is not None and node >= 0:
        found["gpu_numa_node"] = node
        found["near_cpus"] = len(_cpus_of(node) & os.sched_getaffinity(0))
    return found


def generation_of(speed: str | None) -> int | None:
    """Of PCIe, from "32.0 GT/s PCIe"."""
    with suppress(ValueError, AttributeError, IndexError):
        rate = float(str(speed).split()[0])
        return {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(rate)
    return None


def _pci_folder(device: torch.device) -> Path | None:
    """Where the system tells of the GPU's place on the bus."""
    gpu = torch.cuda.get_device_properties(device)
    place: list[Any] = [
        getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    if any(part is None for part in place):
        return None
    folder = Path("/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0".format(*place))
    return folder if folder.is_dir() else None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[0].strip()
    return None


def _cpus_of(node: int) -> set[int]:
    cpus: set[int] = set()
    for part in (_read(f"/sys/devices/system/node/node{node}/cpulist") or "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _cpu_flags() -> tuple[str, ...]:
    text = _read("/proc/cpuinfo") or ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return tuple(flag for flag in CPU_FLAGS if flag in line.split())


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _library() -> str:
    try:
        Library()
    except BuildError as error:
        return str(error)
    return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _number(file: Path) -> int | None:
    with suppress(ValueError):
        return int(_read(file) or "")
    return None


def _read(file: str | Path) -> str | None:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None
