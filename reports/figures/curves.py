"""Miss-ratio curves of a recording, with the bounds, and the measured decodes as points."""

from __future__ import annotations

from typing import Any

from residency.reports.figures.style import (
    GREY,
    GRID,
    SMALL,
    Picture,
    color,
    label,
    legend_below,
    marker,
    new_figure,
)
from residency.reports.replays import Drawn

BOUNDS = (("#222222", "-"), ("#222222", "--"), ("#888888", "-."))
CAPTION = (
    "Recorded routes, replayed: the share of expert lookups that miss a pool of so many slots; "
    "lower is better. Belady's lines are bounds that know the future; static is the best fixed "
    "choice. "
)
LIVE = (
    "Crosses, in the colour of their policy, are what the measured runs missed in decode; those "
    "of a bench decode other prompts than the recording's and lie near the curves, not on them. "
)


def picture(drawn: Drawn, name: str) -> Picture | None:
    """None without lines."""
    if not drawn.lines:
        return None
    figure = new_figure(7.2, 4.4 + 0.1 * len(drawn.lines))
    axes = figure.add_subplot()
    handles: dict[str, Any] = {}
    policies = [line for line in drawn.lines if not line.bound]
    for number, line in enumerate(policies):
        line_style: dict[str, Any] = {
            "ls": ("-", "--")[number // 8 % 2],
            "marker": marker(number),
            "ms": 4,
        }
        (handles[label(line.name)],) = axes.plot(
            *_percent(line.points), color=color(number), lw=1.4, **line_style
        )
    for number, line in enumerate(line for line in drawn.lines if line.bound):
        shade, dash = BOUNDS[number % len(BOUNDS)]
        (handles[label(line.name)],) = axes.plot(
            *_percent(line.points), color=shade, ls=dash, lw=1.1
        )
    if drawn.live:
        shades = {line.name: color(number) for number, line in enumerate(policies)}
        style: dict[str, Any] = {
            "marker": "X",
            "s": 60,
            "edgecolor": "black",
            "lw": 0.8,
            "zorder": 5,
        }
        for policy, slots, miss in drawn.live:
            axes.scatter([slots], [miss * 100], color=shades.get(policy, "white"), **style)
        handles["measured decodes"] = axes.scatter([], [], color="white", **style)
    handles[f"token cycle ({drawn.cycle} slots)"] = axes.axvline(
        drawn.cycle, color=GREY, ls=":", lw=1.2
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"pool size (slots, of {drawn.num_experts} experts)", fontsize=SMALL + 1)
    axes.set_ylabel(f"missed lookups of {drawn.phase} (%)", fontsize=SMALL + 1)
    axes.set_title(label(drawn.title), fontsize=9)
    axes.tick_params(labelsize=SMALL)
    axes.grid(True, color=GRID, lw=0.5)
    legend_below(figure, list(handles.values()), list(handles))
    caption = (
        f"{drawn.title}. {CAPTION}"
        + (LIVE if drawn.live else "")
        + " ".join(f"{n}." for n in drawn.notes)
    )
    alt = f"Miss ratio in per cent over slots for {len(policies)} policies and their bounds"
    return Picture(name, "Miss ratio over the size of the pool", caption, alt, figure)


def _percent(points: tuple[tuple[int, float], ...]) -> tuple[list[int], list[float]]:
    return [slots for slots, _ in points], [miss * 100 for _, miss in points]
