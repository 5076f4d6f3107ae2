"""A replay's result, as result.json holds it and as a person reads it."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from residency.runtime.environment import environment
from residency.runtime.replay.curves import Curves
from residency.runtime.traces.following import shape_text
from residency.runtime.traces.trace import Trace

VERSION = 1
KIND = "replay"


def as_dict(curves: Curves, trace: Trace, file: str) -> dict[str, Any]:
    """docs/replay.md describes every key."""
    space = trace.space
    return {
        "version": VERSION,
        "kind": KIND,
        "trace": {
            "file": file,
            "layers": space.num_layers,
            "experts": space.num_experts,
            "top_k": space.top_k,
            "tokens": trace.num_tokens,
            "steps": trace.num_steps,
            "accesses": trace.accesses,
            "about": dict(trace.about),
        },
        "cycle": curves.cycle,
        "policies": [curve.as_dict() for curve in curves.policies],
        "bounds": [curve.as_dict() for curve in curves.bounds],
        "seconds": curves.seconds,
        "environment": environment(torch.device("cpu")),
        "notes": curves.notes,
    }


def title(trace: Trace, file: str) -> str:
    return f"{file}: {trace.num_tokens:,} tokens, {shape_text(trace.space)}"


def curves_table(curves: Curves, trace: Trace, file: str) -> Table:
    """Miss ratios, a column for each size."""
    table = Table(title=f"Miss ratio: {title(trace, file)}", title_justify="left")
    table.add_column("slots", no_wrap=True)
    for point in curves.policies[0].points:
        table.add_column(f"{point.slots:,}", justify="right", no_wrap=True)
    sizes = [point.slots for point in curves.policies[0].points]
    table.add_row("of all experts", *(f"{size / curves.space.num_ids:.0%}" for size in sizes))
    table.add_section()
    for group in (curves.policies, curves.bounds):
        for curve in group:
            table.add_row(curve.name, *(f"{point.miss_ratio:.2%}" for point in curve.points))
        table.add_section()
    table.caption = f"token cycle {curves.cycle} slots; {curves.seconds:.1f} s"
    return table
