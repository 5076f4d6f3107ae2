"""GPU jobs take turns: a lock for each GPU of the machine, which a worker holds while it lives."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from residency.sweeps.locks import take

POLL_S = 0.2


def take_turn(index: int, told: Callable[[str], None]) -> None:
    """Wait until no other worker has GPU `index`, as CUDA counts them; it is this process's then.

    Asks nothing of CUDA, which would take memory on the GPU already.
    """
    name = gpu_name(index)
    file = lock_file(name)
    if take(file):
        return
    told(f"waits for its turn on GPU {name}")
    while not take(file):
        time.sleep(POLL_S)


def lock_file(name: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9-]", "-", name)
    return Path(tempfile.gettempdir()) / f"residency-gpu-{safe}.lock"


def gpu_name(index: int) -> str:
    """The GPU's UUID where the driver tells it, so that processes that see others agree on it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if visible is None else [name.strip() for name in visible.split(",")]
    name = names[index] if index < len(names) else str(index)
    return _uuids().get(name, name)


def _uuids() -> dict[str, str]:
    """UUIDs by index, as nvidia-smi counts."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.partition(",") for line in answer.stdout.splitlines()]
    return {index.strip(): uuid.strip() for index, _, uuid in rows}
