"""Miss-ratio curves as a picture, with the bounds and the token cycle marked."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

from residency.runtime.replay.curves import Curves

CHART_NAME = "curves.png"
COLORS = ("#c0392b", "#2166ac", "#1b7837", "#762a83", "#b35806", "#35978f", "#c51b7d", "#4d4d4d")
BOUNDS = (("#222222", "-"), ("#222222", "--"), ("#888888", ":"))


def chart_png(curves: Curves, title: str) -> bytes:
    """The chart as a PNG file's bytes."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for at, curve in enumerate(curves.policies):
        color, style = COLORS[at % len(COLORS)], ("-", "--")[at // len(COLORS) % 2]
        _draw(axes, curve, color=color, ls=style, marker="o", ms=3.5, lw=1.5)
    for at, curve in enumerate(curves.bounds):
        color, style = BOUNDS[at % len(BOUNDS)]
        _draw(axes, curve, color=color, ls=style, lw=1.2 if at < len(BOUNDS) else 0.6)
    axes.axvline(curves.cycle, color="#888888", lw=0.8, label=f"token cycle ({curves.cycle})")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"slots (of {curves.space.num_ids} experts)")
    axes.set_ylabel("miss ratio")
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(True, color="#dddddd", lw=0.5)
    axes.legend(fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _draw(axes: Any, curve: Any, **style: Any) -> None:
    slots = [point.slots for point in curve.points]
    axes.plot(slots, [point.miss_ratio for point in curve.points], label=curve.name, **style)
