"""Hit rates by layer: a row a configuration, a column a MoE layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from residency.reports.contests import Contest, Entrant
from residency.reports.figures.rows import row_label
from residency.reports.figures.style import SMALL, Picture, label, new_figure
from residency.reports.measures import DECODE, Measure, place_text

CAPTION = (
    "Each cell is the share of a layer's expert lookups that found the expert in a slot, summed "
    "over the timed runs; bright is more hits. A dark column is a layer whose routes are hard to "
    "keep; a dark row is a configuration that keeps little. White: not told. In brackets: the job."
)
Rows = list[tuple[str, list[float]]]  # of a label, the hit rate of each layer in per cent


def picture(contest: Contest, name: str) -> Picture | None:
    """Panels of decode and of prompts, those left out in which nothing hits. None without any."""
    panels = [("decode", _rows(contest.entrants, None))]
    panels += [
        (f"prefill, {place_text(place) or 'cold pool'}", _rows(contest.entrants, place))
        for place in contest.places
    ]
    panels = [(title, rows) for title, rows in panels if _worth(rows)]
    if not panels:
        return None
    heights = [0.75 + 0.24 * len(rows) for _, rows in panels]
    figure = new_figure(8.2, sum(heights) + 0.4)
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    image = None
    for (axes,), (title, rows) in zip(grid, panels, strict=True):
        image = _draw(axes, title, rows)
    bar = figure.colorbar(image, ax=[axes for (axes,) in grid], shrink=0.9, pad=0.02)
    bar.set_label("hit rate (%)", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    alt = f"Heat map of hit rates in per cent, {max(len(r) for _, r in panels)} rows by layer"
    return Picture(name, "Hits by layer", CAPTION, alt, figure)


def _rows(entrants: Sequence[Entrant], place: tuple[str, int] | None) -> Rows:
    """place: of prompts of all lengths together; None for decode."""
    found = []
    for entrant in entrants:
        own = [
            measure
            for at, measure in entrant.measures.items()
            if (at.quantity == DECODE if place is None else at.quantity != DECODE)
            and (place is None or at.place == place)
        ]
        if rates := rates_of(own):
            found.append((row_label(entrant), rates))
    return found


def rates_of(measures: Sequence[Measure]) -> list[float]:
    """Per cent, by layer, over all `measures`; empty where no counters are told."""
    lookups: dict[int, int] = {}
    hits: dict[int, int] = {}
    for measure in measures:
        for row in measure.counters:
            lookups[row["layer"]] = lookups.get(row["layer"], 0) + row["lookups"]
            hits[row["layer"]] = hits.get(row["layer"], 0) + row["hits"]
    if not lookups or max(lookups) >= 10_000:
        return []
    layers = range(max(lookups) + 1)
    return [hits[n] / lookups[n] * 100 if lookups.get(n) else math.nan for n in layers]


def _worth(rows: Rows) -> bool:
    return any(rate > 0 for _, rates in rows for rate in rates)


def _draw(axes: Any, title: str, rows: Rows) -> Any:
    width = max(len(rates) for _, rates in rows)
    cells = [[*rates, *[math.nan] * (width - len(rates))] for _, rates in rows]
    style = {"vmin": 0, "vmax": 100, "cmap": "cividis", "interpolation": "nearest"}
    image = axes.imshow(cells, aspect="auto", **style)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=SMALL)
    step = max(1, width // 16)
    axes.set_xticks(range(0, width, step), [str(n) for n in range(0, width, step)])
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel("MoE layer (ordinal, from 0)", fontsize=SMALL + 1)
    axes.set_ylabel("configuration", fontsize=SMALL + 1)
    axes.set_title(label(title), fontsize=9)
    return image
