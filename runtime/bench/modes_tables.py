"""Prefill modes side by side, as a person reads them."""

from __future__ import annotations

from rich.table import Table

from residency.runtime.bench.modes_report import Entry, ModesReport, Panel, Stage, ratio


def modes_tables(report: ModesReport) -> list[Table]:
    """One table a panel: a row for each length, a column for each mode."""
    return [_table(panel, report.title) for panel in report.panels]


def _table(panel: Panel, title: str) -> Table:
    table = Table(title=f"TTFT ms: {panel.name}; {title}", title_justify="left")
    table.add_column("tokens", justify="right", no_wrap=True)
    for label in panel.stages[0].entries:
        table.add_column(_heading(label), justify="right", overflow="fold")
    table.add_column("least\nfloor", justify="right", no_wrap=True)
    for stage in panel.stages:
        table.add_row(str(stage.tokens), *_cells(stage))
    table.caption = _caption(panel)
    return table


def _heading(label: str) -> str:
    """In short lines."""
    return label.replace(" ", "\n").replace("_", "_\n")


def _cells(stage: Stage) -> list[str]:
    """The fastest mode is bold."""
    best = min(entry.median_s for entry in stage.entries.values())
    cells = [
        f"[bold]{_cell(entry)}[/bold]" if entry.median_s == best else _cell(entry)
        for entry in stage.entries.values()
    ]
    least = stage.least_floor_s
    return [*cells, "-" if least is None else _ms(least)]


def _cell(entry: Entry) -> str:
    """The time, its ratio to the mode's own floor, and what most layers chose if any did."""
    over = ratio(entry.median_s, entry.own_floor_s)
    lines = [_ms(entry.median_s), *([] if over is None else [f"x{over:.2f}"])]
    layers = {} if entry.fixed else entry.layers_by_choice
    if layers:
        lines.append(max(layers, key=lambda choice: layers[choice]))
    return "\n".join(lines)


def _caption(panel: Panel) -> str:
    told = "x: over the mode's own floor; bold: the fastest"
    if not panel.crossing:
        return told
    one, other = panel.crossing
    if panel.crosses_at is None:
        return f"{told}; {one} and {other} do not cross"
    return f"{told}; {one} and {other} cross at {panel.crosses_at:.0f} tokens"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"
