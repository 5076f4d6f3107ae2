"""Prefill modes as a picture: time to first token over chunk length, a panel a pool and prefix."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from residency.runtime.bench.modes_report import Entry, ModesReport, Panel

# Okabe and Ito's colours, which remain distinct to the colour-blind.
COLORS = ("#000000", "#e69f00", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
MARKERS = "osD^vPX"
SHADES = ("#d9d9d9", "#8da0cb", "#fc8d62", "#66c2a5", "#e78ac3", "#ffd92f")  # of choices
GREY = "#777777"
HEADROOM = 1.6  # above the lines, for the crossing's label


def modes_png(report: ModesReport) -> bytes:
    """The picture as a PNG file's bytes."""
    prefixes = list(dict.fromkeys(panel.prefix for panel in report.panels))
    pools = list(dict.fromkeys(panel.pool for panel in report.panels))
    choosing = [label for label in report.labels if _choices(report, label)]
    heights = [4.0, *(0.35 for _ in choosing)] * len(prefixes)
    figure = Figure(
        figsize=(5.6 * len(pools) + 0.6, sum(heights) + 1.9 * len(prefixes)), layout="constrained"
    )
    grid = figure.subplots(
        len(heights),
        len(pools),
        squeeze=False,
        sharex=True,
        sharey="row",
        gridspec_kw={"height_ratios": heights},
    )
    for panel in report.panels:
        row = prefixes.index(panel.prefix) * (1 + len(choosing))
        column = pools.index(panel.pool)
        _draw(grid[row][column], panel, report)
        for below, label in enumerate(choosing, 1):
            _draw_choices(grid[row + below][column], panel, report, label)
        lowest = grid[row + len(choosing)][column]
        lowest.set_xlabel("chunk length (tokens)")
        lowest.tick_params(labelbottom=True, labelsize=8)
    for row in range(0, len(grid), 1 + len(choosing)):
        grid[row][0].set_ylabel("time to first token (ms)")
        grid[row][0].set_ylim(top=grid[row][0].get_ylim()[1] * HEADROOM)
    _legend(figure, grid[0][0], report, choosing)
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _draw(axes: Any, panel: Panel, report: ModesReport) -> None:
    tokens = [stage.tokens for stage in panel.stages]
    for number, label in enumerate(report.labels):
        entries = [stage.entries[label] for stage in panel.stages]
        _draw_mode(axes, tokens, entries, label, number)
    resident = report.resident[panel.prefix].prefill
    if resident:
        times = [samples.seconds.least * 1e3 for samples in resident]
        name = "every expert resident"
        axes.plot([s.tokens for s in resident], times, color=GREY, ls=":", lw=1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(n) for n in tokens], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelleft=True)
    axes.grid(True, which="both", color="#e4e4e4", lw=0.5)
    axes.set_title(panel.name, fontsize=9)
    _draw_crossing(axes, panel)


def _draw_mode(axes: Any, tokens: list[int], entries: list[Entry], label: str, number: int) -> None:
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    spreads = [entry.point.samples.seconds for entry in entries]
    medians = [spread.median * 1e3 for spread in spreads]
    below = [(spread.median - spread.least) * 1e3 for spread in spreads]
    above = [(spread.most - spread.median) * 1e3 for spread in spreads]
    # Each a little smaller than the one before, and hollow if it is fixed, so that none is hidden.
    fill = "none" if all(entry.fixed for entry in entries) else color
    style = {"color": color, "marker": marker, "ms": 7.5 - 0.6 * number, "mfc": fill, "lw": 1.3}
    axes.errorbar(tokens, medians, yerr=[below, above], label=label, capsize=2, **style)
    floors = [entry.own_floor_s for entry in entries]
    if None not in floors:
        axes.plot(tokens, [floor * 1e3 for floor in floors if floor], color=color, ls="--", lw=0.7)


def _draw_crossing(axes: Any, panel: Panel) -> None:
    if panel.crosses_at is None:
        return
    axes.axvline(panel.crosses_at, color=GREY, lw=0.9, ls="-.")
    text = f"{panel.crossing[0]} = {panel.crossing[1]}\nat {panel.crosses_at:.0f} tokens"
    tokens = [stage.tokens for stage in panel.stages]
    on_left = panel.crosses_at**2 > tokens[0] * tokens[-1]
    axes.annotate(
        text,
        (panel.crosses_at, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if on_left else 5, 0),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="top",
        fontsize=8,
        color="#333333",
    )


def _choices(report: ModesReport, label: str) -> list[str]:
    """What a mode that is not fixed chose anywhere, in order of first use."""
    names: dict[str, None] = {}
    for panel in report.panels:
        for stage in panel.stages:
            entry = stage.entries[label]
            names |= dict.fromkeys([] if entry.fixed else entry.layers_by_choice)
    return list(names)


def _draw_choices(axes: Any, panel: Panel, report: ModesReport, label: str) -> None:
    """At each length, a bar of full height cut into the shares of the layers by choice."""
    shades = dict(zip(_choices(report, label), SHADES, strict=False))
    for stage in panel.stages:
        layers = stage.entries[label].layers_by_choice
        bottom, whole = 0.0, sum(layers.values())
        for choice, shade in shades.items():
            share = layers.get(choice, 0) / whole if whole else 0.0
            left, right = stage.tokens * 2**-0.4, stage.tokens * 2**0.4
            axes.bar(left, share, right - left, bottom, align="edge", color=shade)
            bottom += share
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel(f"{label}\nchose", fontsize=7, rotation=0, ha="right", va="center")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, axes: Any, report: ModesReport, choosing: list[str]) -> None:
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [*report.labels, *(name for name in found if name not in report.labels)]
    handles = [found[name] for name in names]
    handles += axes.plot([], [], color=GREY, ls="--", lw=0.7)
    names.append("floor of the mode of that colour")
    for label in choosing:
        for choice, shade in zip(_choices(report, label), SHADES, strict=False):
            handles.append(Patch(color=shade))
            names.append(f"{label}: {choice}")
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _title(report: ModesReport) -> str:
    weights = "made-up weights" if report.made_up else "a checkpoint's weights"
    device = report.environment["device_name"]
    count = report.contest["repeats"]
    turns = f"median and range of {count} turns" if count > 1 else "one turn"
    return (
        f"{report.model}, experts in {report.format}, {weights}, {report.routing}\n"
        f"{report.title}, {device}; {turns}"
    )
