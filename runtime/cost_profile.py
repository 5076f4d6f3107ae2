"""The cost profile: measured link costs, kept in a file from run to run.

A file a device, format and expert shape, in the user's cache folder. It only saves a start without
measurements: one that is missing, damaged or cannot be written is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from residency.policies.errors import OutputError
from residency.runtime.results import write_whole

VERSION = 2


def profile_path(device_name: str, what: str) -> Path:
    """The file of a device and a kind of expert, e.g. "nvfp4 2560x640"."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^a-z0-9]+", "-", f"{device_name} {what}".lower()).strip("-")
    return root / "residency" / "costs" / f"{name}.json"


def copied_profile(path: Path, folder: Path) -> Path:
    """The copy of a profile in `folder`, made when it is first asked for; later changes of the
    profile do not reach it. Where there is none, the copy is of none. Raises OutputError.
    """
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    copy = folder / f"{path.stem}-{digest}.json"
    if not copy.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b"{}\n"
        except OSError as error:
            raise OutputError(f"{copy}: cannot be made ({error.strerror})") from error
        write_whole({copy: content}, "cost profile")
    return copy


def read_profile(path: Path) -> dict[str, Any] | None:
    """What LinkCosts.as_dict gave, or None."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            return None
        costs: dict[str, Any] = content["costs"]
        by_length = [*costs["gap_s"].items(), *costs["host_s"].items()]
        numbers = [costs["expert_s"], costs["answer_s"], *(number for _, number in by_length)]
        sound = all(isinstance(number, float) and 0 <= number < 1e3 for number in numbers)
        sound = sound and all(int(size) > 0 for size, _ in by_length)
        return costs if sound and costs["expert_s"] > 0 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_profile(path: Path, costs: dict[str, Any]) -> bool:
    """Whether it could be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"version": VERSION, "costs": costs}, indent=1)
        write_whole({path: content.encode() + b"\n"}, "cost profile")
    except (OSError, OutputError):
        return False
    return True
