"""Launches: what a kernel in a captured graph takes when it has next to nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from residency.runtime.graphs import Graphs
from residency.runtime.machine.measurement import GRAPH_KERNEL, SECONDS, Measurement, rates
from residency.runtime.machine.pages import NothingToMeasure
from residency.runtime.machine.sizes import Effort

KERNELS = 256


class CaptureFailed(Exception):
    """The device took no graph."""


def graph_kernels(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """Small kernels, one behind the other, as a decode step has them."""
    if device.type != "cuda":
        raise NothingToMeasure("the CPU has no graphs")
    numbers, graphs = torch.zeros(64, device=device), Graphs()

    def body() -> None:
        for _ in range(KERNELS):
            numbers.add_(1)

    def run() -> None:
        graphs.run("kernels", body, on=device)

    run()
    run()
    if not len(graphs):
        raise CaptureFailed("decode steps cannot be captured as a graph here")
    found = [1 / rate for rate in rates(run, KERNELS, device, effort.repeats)]
    yield Measurement.of(GRAPH_KERNEL, f"{KERNELS} of them, captured", SECONDS, found)
