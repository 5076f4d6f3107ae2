"""A machine profile for a terminal."""

from __future__ import annotations

from rich.table import Table

from residency.runtime.machine.measurement import BYTES_S, OPERATIONS_S, Measurement
from residency.runtime.machine.profile import MachineProfile


def machine_table(profile: MachineProfile) -> Table:
    """One row a measurement."""
    environment = profile.environment
    names = [name for name in ("torch", "transformers", "cuda") if name in environment]
    versions = ", ".join(f"{name} {environment[name]}" for name in names)
    table = Table(title=f"{profile.device_name}: {versions}", title_justify="left")
    table.add_column("measured")
    for name in ("median", "least to most"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for one in profile.measurements.values():
        spread = f"{_number(one.unit, one.spread.least)} to {shown(one.unit, one.spread.most)}"
        table.add_row(one.name, shown(one.unit, one.value), spread, one.what)
    return table


def line(measurement: Measurement) -> str:
    return f"{measurement.name}: {shown(measurement.unit, measurement.value)}"


def shown(unit: str, value: float) -> str:
    return f"{_number(unit, value)} {_UNITS[unit] if unit in _UNITS else _time_unit(value)}"


_UNITS = {BYTES_S: "GB/s", OPERATIONS_S: "TFLOP/s"}
_SCALES = {BYTES_S: 1e9, OPERATIONS_S: 1e12}


def _number(unit: str, value: float) -> str:
    if unit in _SCALES:
        return f"{value / _SCALES[unit]:,.2f}"
    return f"{value * (1e3 if _time_unit(value) == 'ms' else 1e6):,.2f}"


def _time_unit(seconds: float) -> str:
    return "ms" if seconds >= 1e-3 else "us"
