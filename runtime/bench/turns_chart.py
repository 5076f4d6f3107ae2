"""Conversations as a picture: what turns take over what they are about, and all of them in sum."""

from __future__ import annotations

import io
from itertools import accumulate
from typing import Any

from matplotlib.figure import Figure

from residency.runtime.bench.modes_chart import COLORS, GREY, MARKERS
from residency.runtime.bench.turns_report import ConversationReport, Entry

MB = 1e6


def turns_png(report: ConversationReport) -> bytes:
    """The picture as a PNG file's bytes."""
    figure = Figure(figsize=(10.5, 8.2), layout="constrained")
    (by_tokens, in_sum), (by_bytes, moved) = figure.subplots(2, 2)
    routed = [row.entries[report.labels[0]].routed_bytes / MB for row in report.rows]
    for number, label in enumerate(report.labels):
        entries = [row.entries[label] for row in report.rows]
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        style = {"color": color, "marker": marker, "ms": 5, "lw": 0, "mfc": "none"}
        _scatter(by_tokens, [e.turn.new for e in entries], entries, style, label)
        by_bytes.plot(routed, [e.ttft_s.least * 1e3 for e in entries], **style)
        _fit(by_bytes, report, label, color)
        moved.plot(routed, [e.samples.link_bytes / MB for e in entries], **style)
        _sum(in_sum, [e.ttft_s.median for e in entries], {"color": color, "lw": 1.6})
        floors = [e.floor.own_s for e in entries if e.floor is not None]
        if len(floors) == len(entries):
            _sum(in_sum, floors, {"color": color, "lw": 0.8, "ls": "--"})
    _begins(in_sum, report)
    by_tokens.set_xlabel("new tokens of the turn")
    by_tokens.set_ylabel("time to first token (ms)")
    in_sum.set_xlabel("turns, all sessions one after another")
    in_sum.set_ylabel("time to first tokens, in sum (s)")
    in_sum.set_xlim(0, len(report.rows))
    for axes in (by_bytes, moved):
        axes.set_xlabel("experts that the new tokens are routed to (MB)")
    by_bytes.set_ylabel("time to first token, fastest run (ms)")
    moved.set_ylabel("moved over the link before the first token (MB)")
    for axes in (by_tokens, in_sum, by_bytes, moved):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(True, color="#e4e4e4", lw=0.5)
    _legend(figure, by_tokens)
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _scatter(axes: Any, x: list[float], entries: list[Entry], style: Any, label: str) -> None:
    spreads = [entry.ttft_s for entry in entries]
    medians = [spread.median * 1e3 for spread in spreads]
    below = [(spread.median - spread.least) * 1e3 for spread in spreads]
    above = [(spread.most - spread.median) * 1e3 for spread in spreads]
    axes.errorbar(x, medians, yerr=[below, above], label=label, elinewidth=0.7, **style)
    judged = [(at, e.floor.own_s * 1e3) for at, e in zip(x, entries, strict=True) if e.floor]
    if judged:
        axes.plot(*zip(*judged, strict=True), color=style["color"], marker="_", ms=9, lw=0)


def _fit(axes: Any, report: ConversationReport, label: str, color: str) -> None:
    one = report.sums[label]
    if one.fit is None:
        return
    most = max(row.entries[label].routed_bytes for row in report.rows)
    ends = [one.fit.intercept * 1e3, (one.fit.intercept + one.fit.slope * most) * 1e3]
    axes.plot([0, most / MB], ends, color=color, lw=0.8, ls=":")


def _sum(axes: Any, seconds: list[float], style: Any) -> None:
    axes.plot(range(len(seconds) + 1), [0.0, *accumulate(seconds)], **style)


def _begins(axes: Any, report: ConversationReport) -> None:
    """A line where each session begins."""
    for number, row in enumerate(report.rows):
        if row.line.turn == 1 and number:
            axes.axvline(number, color=GREY, lw=0.5, ls=":")


def _legend(figure: Any, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    handles += [
        *axes.plot([], [], color=GREY, marker="_", ms=9, lw=0.8, ls="--"),
        *axes.plot([], [], color=GREY, ls=":", lw=0.8),
    ]
    names += ["floor of the mode of that colour", "line of least squares; where a session begins"]
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _title(report: ConversationReport) -> str:
    weights = "made-up weights" if report.made_up else "a checkpoint's weights"
    device = report.environment["device_name"]
    count = report.keys["repeats"]
    runs = f"median and range of {count} runs" if count > 1 else "one run"
    routing = [note for note in report.notes if note.startswith("routing: ")]
    routes = routing[0].partition(" (")[0] if routing else "routing: the model's"
    sessions = len({row.line.session for row in report.rows})
    return (
        f"{report.model}, experts in {report.format}, {weights}, {routes}\n{report.title}, "
        f"{device}; {sessions} sessions, {len(report.rows)} turns; {runs} of each"
    )
