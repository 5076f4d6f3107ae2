"""A replay's result, as result.json holds it and as a person reads it."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from residency.runtime.environment import environment
from residency.runtime.replay.curves import Curves
from residency.runtime.replay.tuning import Search
from residency.runtime.traces.following import shape_text
from residency.runtime.traces.trace import Trace

VERSION = 1
KIND = "replay"
TUNED = "tune"


def as_dict(curves: Curves, trace: Trace, file: str) -> dict[str, Any]:
    """docs/replay.md describes every key."""
    return {
        "version": VERSION,
        "kind": KIND,
        "trace": _trace_as_dict(trace, file),
        "cycle": curves.cycle,
        "policies": [curve.as_dict() for curve in curves.policies],
        "bounds": [curve.as_dict() for curve in curves.bounds],
        "seconds": curves.seconds,
        "environment": environment(torch.device("cpu")),
        "notes": curves.notes,
    }


def tuned_as_dict(
    found: Search, curves: Curves, parts: tuple[Trace, Trace], file: str, overrides: str
) -> dict[str, Any]:
    """docs/replay.md describes every key. parts: what it was fitted to, what `curves` are of."""
    tried = [{"choice": dict(one.choice), "hit_rates": one.hit_rates} for one in found.tried]
    fit = {"trace": _trace_as_dict(parts[0], file), "tried": tried}
    return as_dict(curves, parts[1], file) | {"kind": TUNED, "overrides": overrides, "fit": fit}


def _trace_as_dict(trace: Trace, file: str) -> dict[str, Any]:
    space = trace.space
    return {
        "file": file,
        "layers": space.num_layers,
        "experts": space.num_experts,
        "top_k": space.top_k,
        "tokens": trace.num_tokens,
        "steps": trace.num_steps,
        "accesses": trace.accesses,
        "about": dict(trace.about),
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
