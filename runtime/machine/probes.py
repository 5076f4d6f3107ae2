"""Probes: all that `residency doctor` measures, one after another, none able to stop the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import torch

from residency.policies.errors import one_line
from residency.runtime.environment import environment
from residency.runtime.host_experts.build import BuildError
from residency.runtime.machine.computing import experts_on_the_host, host_turns, products
from residency.runtime.machine.copies import device_copies, gathers, pageable_copy, pinned_copies
from residency.runtime.machine.facts import facts_of
from residency.runtime.machine.launches import graph_kernels
from residency.runtime.machine.layers import layers
from residency.runtime.machine.measurement import Measurement
from residency.runtime.machine.pages import NothingToMeasure, pinning
from residency.runtime.machine.profile import MachineProfile
from residency.runtime.machine.sizes import Effort

Probe = Callable[[torch.device, Effort], Iterator[Measurement]]
Told = Callable[[Measurement | str], None]

PROBES: dict[str, Probe] = {
    "pageable copies": pageable_copy,
    "pinned copies": pinned_copies,
    "gathers": gathers,
    "device copies": device_copies,
    "matrix products": products,
    "experts on the host": experts_on_the_host,
    "host turns": host_turns,
    "pinning": pinning,
    "graph capture": graph_kernels,
    "layers": layers,
}


def examine(
    device: torch.device,
    told: Told = lambda _: None,
    *,
    quick: bool = False,
    probes: dict[str, Probe] | None = None,
) -> MachineProfile:
    """Measure a machine. `told` hears each measurement, and a line of each probe that failed."""
    effort, facts = Effort.of(device, quick=quick), facts_of(device)
    measured: dict[str, Measurement] = {}
    failures: dict[str, str] = {}
    for name, probe in (PROBES if probes is None else probes).items():
        try:
            for measurement in probe(device, effort):
                measured[measurement.name] = measurement
                told(measurement)
        except NothingToMeasure:
            continue
        except (Exception, BuildError) as error:  # whatever a driver or a library may raise
            reason = one_line(str(error)) or type(error).__name__
            failures[name] = reason
            told(f"{name}: not measured: {reason}")
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return MachineProfile(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(device),
        measurements=measured,
        facts=facts.as_dict(),
        failures=failures,
    )
