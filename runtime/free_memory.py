"""Free memory: what the host and a device can still give, by what the system says of itself.

A process in a container sees the machine's memory in /proc/meminfo, and is killed at the limit of
its control group; so the least of both counts. Where neither is there, as on macOS, physical memory
is all that is known.

Memory that CUDA pins counts as the process's own, so the same limits hold for it. The limit of
locked memory (`ulimit -l`) is another thing: it bounds mlock, and CUDA's driver pins pages without
it. What a driver refuses for reasons of its own (under WSL it gives a part of memory only) is known
when it is tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path("/")
GIB = 1 << 30
SYSTEM_SHARE = 8  # of host memory that is free beside the banks, one part in so many


@dataclass(frozen=True)
class Room:
    """Bytes that are free. device: of a GPU; None where the slots lie in host memory."""

    host: int
    device: int | None = None

    def with_freed(self, num_bytes: int) -> Room:
        """When so many more are free where the slots are."""
        if self.device is None:
            return Room(self.host + num_bytes)
        return Room(self.host, self.device + num_bytes)

    def beside_system(self, bank_bytes: int) -> Room:
        """Less what is left to the system where the slots lie in host memory: a part of what is
        free beside banks that are yet to be taken. Other programs and cached files live there, and
        a pool that fills a machine to its last page is read from disk.
        """
        if self.device is not None:
            return self
        return Room(self.host - max(0, self.host - bank_bytes) // SYSTEM_SHARE)


def free_host_bytes(root: Path = ROOT) -> int:
    """What can be taken without swapping and within the control group's limits."""
    return min(_available(root), *_within_groups(root))


def free_device_bytes(device: torch.device) -> int | None:
    """Of a GPU, without what the allocator keeps for itself; None for the host."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within_groups(root: Path) -> Iterator[int]:
    """What each limit leaves, of the process's own group and of those above it, in cgroup v2 or v1.

    At least one number: where there is no limit, one that no machine reaches.
    """
    yield 1 << 62
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Where the group is the root of what the container sees, its path there leads nowhere.
        own = Path(path.lstrip("/"))
        for group in [mount / each for each in (own, *own.parents)]:
            if (left := _left(group, *names)) is not None:
                yield left


def _left(group: Path, limit: str, used: str) -> int | None:
    """The limit less what is in use; files that the system keeps in memory give way."""
    try:
        most = int((group / limit).read_text())  # "max": no limit
        taken = int((group / used).read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    prefix = "total_" if "total_inactive_file" in fields else ""  # v1: the groups below as well
    files = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return max(0, most - max(0, taken - files))


def device_use(device: torch.device | None) -> str:
    """Who holds a GPU's memory, in words; nothing of a device that no one else could hold."""
    if device is None or device.type != "cuda":
        return ""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # it answers nothing any more
        return ""
    own = torch.cuda.memory_reserved(device)
    others = max(0, total - free - own)
    return (
        f"of its {total / GIB:.2f} GiB this process holds {own / GIB:.2f} and other processes and "
        f"CUDA itself {others / GIB:.2f}"
    )
