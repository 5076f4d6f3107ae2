"""Bytes moved, by source, a bar a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from residency.reports.contests import Contest, Entrant
from residency.reports.figures.rows import row_label
from residency.reports.figures.style import (
    COLORS,
    GRID,
    SMALL,
    Picture,
    legend_below,
    new_figure,
)
from residency.reports.measures import DECODE, TTFT, At
from residency.runtime.counters import Source

GB_FROM = 1e10  # bytes
WORDS = {
    Source.STREAM: "stream: host bank to staging",
    Source.FETCH: "fetch: host bank to a slot",
    Source.D2D: "d2d: on the device, not over the link",
    Source.TABLE: "table: rows of host tables",
    Source.ACTIVATIONS: "activations: for experts computed on the host",
}
CAPTION = (
    "What moved, on average over the timed runs: each bar is cut by where bytes came from. All but "
    "d2d cross the link between host and device, so a longer bar is a longer wait unless compute "
    "hides it. In brackets: the job."
)


def picture(contest: Contest, name: str) -> Picture | None:
    """Panels of decode, and of the shortest and longest prompts. None where bytes are not told."""
    panels = [(at, _those(contest, at)) for at in _points(contest)]
    panels = [(at, those) for at, those in panels if those]
    if not panels:
        return None
    most = max(len(those) for _, those in panels)
    figure = new_figure(8.2, (0.8 + 0.24 * most) * len(panels) + 0.6)
    grid = figure.subplots(len(panels), 1, squeeze=False)
    handles: dict[str, Any] = {}
    for (axes,), (at, those) in zip(grid, panels, strict=True):
        _draw(axes, at, those, handles)
    legend_below(figure, list(handles.values()), list(handles))
    alt = f"Stacked bars: bytes moved by source, for {most} configurations"
    return Picture(name, "Bytes moved, by source", CAPTION, alt, figure)


def _points(contest: Contest) -> list[At]:
    found = [at for at in contest.points if at.quantity == DECODE]
    for place in contest.places:
        own = [at for at in contest.points if at.quantity == TTFT and at.place == place]
        found += dict.fromkeys([own[0], own[-1]])
    return found


def _those(contest: Contest, at: At) -> list[Entrant]:
    """Who tells that bytes moved."""
    told = [e for e in contest.entrants if at in e.measures and e.measures[at].bytes]
    return told if any(sum((e.measures[at].bytes or {}).values()) for e in told) else []


def _draw(axes: Any, at: At, those: Sequence[Entrant], handles: dict[str, Any]) -> None:
    left = [0.0] * len(those)
    whole = max(sum((each.measures[at].bytes or {}).values()) for each in those)
    unit, name = (1e9, "GB") if whole >= GB_FROM else (1e6, "MB")
    for source, shade in zip(Source, COLORS, strict=False):
        sizes = [(each.measures[at].bytes or {}).get(source, 0.0) / unit for each in those]
        if any(sizes):
            bars = axes.barh(range(len(those)), sizes, left=left, color=shade, height=0.7)
            handles.setdefault(WORDS[source], bars)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(those)), [row_label(each) for each in those], fontsize=SMALL)
    axes.set_xlim(0, max(left) * 1.05 or 1)
    axes.invert_yaxis()
    what = (
        "a decode step"
        if at.quantity == DECODE
        else f"a prompt of {at.text.removeprefix(f'{TTFT} at ')}"
    )
    axes.set_xlabel(f"moved by {what} ({name})", fontsize=SMALL + 1)
    axes.tick_params(labelsize=SMALL)
    axes.grid(True, axis="x", color=GRID, lw=0.5)
    axes.set_axisbelow(True)
