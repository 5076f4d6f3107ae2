"""The manifest of a grid: its jobs numbered, named and grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from residency.runtime.environment import environment
from residency.sweeps.grid import SHARED, Grid, Point, identity
from residency.sweeps.manifest import Job, Manifest, Words

ROUTES = "routes"


def manifest_of(
    overrides: Sequence[str], grid: Grid, folders: Sequence[str], *, routes: bool
) -> Manifest:
    """folders: of the grid's points. routes: whether they are recorded."""
    groups: dict[str, int] = {}
    recorded: dict[str, int] = {}
    titles = _titles([point.overrides for point in grid.points])
    jobs = []
    for number, point in enumerate(grid.points):
        group = groups.setdefault(identity(point.config, SHARED), len(groups))
        file = _routes(point, recorded) if routes else None
        jobs.append(Job(number, folders[number], point.overrides, titles[number], group, file))
    skipped = [
        {"overrides": list(one.overrides), "reasons": [asdict(why) for why in one.reasons]}
        for one in grid.skipped
    ]
    duplicates = [
        {"overrides": list(one.overrides), "same_as": one.same_as} for one in grid.duplicates
    ]
    # The machine that plans; each result.json names the one that ran, with its device.
    machine = environment(torch.device("cpu"))
    del machine["device"]
    return Manifest(tuple(overrides), tuple(jobs), tuple(skipped), tuple(duplicates), machine)


def _routes(point: Point, recorded: dict[str, int]) -> str | None:
    """One file for each workload on a model and device, whatever the policies."""
    if not point.config.workload.routes_are_recorded:
        return None
    same = identity(point.config, (*SHARED, "workload"))
    return f"{ROUTES}/{recorded.setdefault(same, len(recorded))}.safetensors"


def _titles(jobs: Sequence[Words]) -> list[str]:
    """The overrides of each job that not all of them have; all of an only one's."""
    everywhere = set(jobs[0]).intersection(*jobs) if jobs else set()
    own = [[word for word in job if word not in everywhere] for job in jobs]
    return [
        " ".join(word.lstrip("+") for word in words or job)
        for words, job in zip(own, jobs, strict=True)
    ]
