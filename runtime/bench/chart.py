"""A bench report as a picture: TTFT over chunk length, between its floors."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from residency.runtime.bench.report import BenchReport

INK, GREY, RED, BLUE = "#222222", "#888888", "#c0392b", "#2166ac"


def chart_png(report: BenchReport) -> bytes:
    """The chart as a PNG file's bytes."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point.samples.tokens for point in report.prefill]
    _draw_measured(axes, report, tokens)
    _draw_floors(axes, report)
    stream_ms = report.whole_stream_s * 1e3
    axes.axhline(stream_ms, color=GREY, ls=":", label="every expert once over the link")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("time to first token (ms)")
    weights = "made-up weights" if report.made_up else "a checkpoint's weights"
    device = report.environment["device_name"]
    axes.set_title(f"{report.title}\n{weights}, {device}", fontsize=9, loc="left")
    axes.grid(True, which="both", color="#dddddd", lw=0.5)
    axes.legend(fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _draw_measured(axes: Any, report: BenchReport, tokens: list[int]) -> None:
    spreads = [point.samples.seconds for point in report.prefill]
    medians = [spread.median * 1e3 for spread in spreads]
    below = [(spread.median - spread.least) * 1e3 for spread in spreads]
    above = [(spread.most - spread.median) * 1e3 for spread in spreads]
    style = {"color": INK, "marker": "o", "ms": 4, "capsize": 3, "lw": 1.5}
    axes.errorbar(tokens, medians, yerr=[below, above], label="measured (median, range)", **style)


def _draw_floors(axes: Any, report: BenchReport) -> None:
    judged = [(p.samples.tokens, p.floor) for p in report.prefill if p.floor is not None]
    if not judged:
        return
    tokens = [n for n, _ in judged]
    lines = {
        "waits_s": ("floor if copies wait for the router", RED, "--"),
        "ahead_s": ("floor if copies run ahead", BLUE, "--"),
        "compute_s": ("all experts resident", GREY, "-"),
    }
    for key, (label, color, style) in lines.items():
        times = [getattr(floor, key) * 1e3 for _, floor in judged]
        axes.plot(tokens, times, color=color, ls=style, lw=1.2, label=label)
