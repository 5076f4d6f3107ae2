"""The machine and the versions behind a result."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("residency", "torch", "transformers")
GIB = 1 << 30


def environment(device: torch.device) -> dict[str, str]:
    """Everything as text. commit: of the checkout that runs, where it is one."""
    return _machine(device) | _versions() | _commit()


def _machine(device: torch.device) -> dict[str, str]:
    found = {
        "device": str(device),
        "device_name": platform.processor() or platform.machine(),
        "cpus": str(os.cpu_count()),
        "host_memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.0f} GiB",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found["device_name"] = gpu.name
        found["device_memory"] = f"{gpu.total_memory / GIB:.0f} GiB"
        found["cuda"] = str(torch.version.cuda)
    return found


@lru_cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


@lru_cache
def _commit() -> dict[str, str]:
    """The commit, marked `-changed` when tracked files differ from it."""
    if not (ROOT / ".git").exists():
        return {}
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "-uno")
    return {"commit": head + ("-changed" if changes else "")} if head else {}


def _git(*words: str) -> str | None:
    """What git says of the checkout, None where it cannot be asked."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
