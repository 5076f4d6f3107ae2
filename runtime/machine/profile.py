"""The machine profile: what `residency doctor` measured, kept in a file for others to begin with.

A file a device, in the user's cache folder. One that is missing, damaged or of another version is
none. `plan` predicts by it; `prefill=auto` and `decode=hybrid` begin with its rates.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residency.policies.errors import ConfigError
from residency.runtime.machine.measurement import Measurement
from residency.runtime.results import write_whole

VERSION = 1
KIND = "machine"


@dataclass(frozen=True)
class MachineProfile:
    """date: when it was measured, ISO 8601. environment: as results have it. facts: what the
    machine is, see `facts`. failures: by probe, why it gave nothing.
    """

    date: str
    environment: Mapping[str, str]
    measurements: Mapping[str, Measurement]
    facts: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        return self.environment["device_name"]

    def rate(self, *names: str) -> float | None:
        """The median of the first of these that was measured."""
        return next((self.measurements[n].value for n in names if n in self.measurements), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "kind": KIND,
            "date": self.date,
            "environment": dict(self.environment),
            "facts": dict(self.facts),
            "measurements": [one.as_dict() for one in self.measurements.values()],
            "failures": dict(self.failures),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> MachineProfile:
        """Raises KeyError, TypeError, ValueError or AttributeError for what is no profile."""
        if found["version"] != VERSION or found["kind"] != KIND:
            raise ValueError(f"version {found['version']} of {found['kind']}")
        measured = [Measurement.from_dict(one) for one in found["measurements"]]
        environment = {str(key): str(value) for key, value in found["environment"].items()}
        if "device_name" not in environment:
            raise ValueError("no device is named")
        return cls(
            date=str(found["date"]),
            environment=environment,
            measurements={one.name: one for one in measured},
            facts=dict(found["facts"]),
            failures={str(key): str(value) for key, value in found["failures"].items()},
        )


def machine_path(device_name: str) -> Path:
    """The file of a device."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return root / "residency" / "machine" / f"{name}.json"


def read_machine(path: Path) -> MachineProfile | None:
    """The profile in a file, or None."""
    try:
        return MachineProfile.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def require_machine(path: Path, option: str) -> MachineProfile:
    """The profile in a file that the user names. Raises ConfigError where there is none."""
    profile = read_machine(path)
    if profile is None:
        why = "holds no machine profile" if path.exists() else "there is no such file"
        raise ConfigError(f"{option} {path}: {why}; `residency doctor --out FILE` writes one")
    return profile


def write_machine(path: Path, profile: MachineProfile, option: str) -> None:
    """Whole or not at all. Raises OutputError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(profile.as_dict(), indent=1).encode() + b"\n"
    write_whole({path: content}, option)
