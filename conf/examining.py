"""`residency doctor`: the device to measure, and where its profile goes."""

from __future__ import annotations

from pathlib import Path

from residency.conf.compose import compose
from residency.policies.errors import ConfigError, OutputError
from residency.runtime.devices import Device
from residency.runtime.machine.profile import MachineProfile, machine_path, write_machine


def compose_device(overrides: list[str]) -> Device:
    """Raises ConfigError for a device that is not there, and for overrides of anything else."""
    for text in overrides:
        if text.lstrip("+~").partition("=")[0].partition(".")[0] != "device":
            raise ConfigError(
                f"{text}: `residency doctor` measures a device; name device=... alone"
            )
    config = compose(overrides)
    for conflict in config.faults("device"):
        raise ConfigError(str(conflict))
    return config.device


def keep(profile: MachineProfile, file: Path | None) -> list[str]:
    """Write it into the user's cache folder, and to `file`; where it was written.

    Raises OutputError if `file`, or without one the cache, cannot be written.
    """
    cached, written = machine_path(profile.device_name), []
    try:
        write_machine(cached, profile, "the cache folder")
        written.append(str(cached))
    except (OSError, OutputError) as error:
        if file is None:
            raise OutputError(
                f"{cached}: cannot be written ({error}); name a FILE: --out"
            ) from None
    if file is not None:
        write_machine(file, profile, "--out")
        written.append(str(file))
    return written
