"""Prefill modes side by side, as a person reads them."""

from __future__ import annotations

from rich.table import Table

from residency.runtime.bench.modes_report import Entry, ModesReport, Panel, Stage, ratio


def modes_tables(report: ModesReport) -> list[Table]:
    """One table a panel: a row for each length, a column for each mode."""
    return [_table(panel, report.title) for panel in report.panels]


def _table(panel: Panel, title: str) -> Table:
    table = Table(title=f"TTFT ms (x own floor): {panel.name}; {title}", title_justify="left")
    table.add_column("tokens", justify="right", no_wrap=True)
    for label in panel.stages[0].entries:
        table.add_column(label.partition(" ")[0], justify="right")
    for word in ("least floor", "best"):
        table.add_column(word, justify="right")
    for stage in panel.stages:
        table.add_row(str(stage.tokens), *_cells(stage))
    table.caption = _caption(panel)
    return table


def _cells(stage: Stage) -> list[str]:
    best = min(stage.entries, key=lambda label: stage.entries[label].median_s)
    cells = [_cell(entry) for entry in stage.entries.values()]
    least = stage.least_floor_s
    return [*cells, "-" if least is None else _ms(least), best.partition(" ")[0]]


def _cell(entry: Entry) -> str:
    over = ratio(entry.median_s, entry.own_floor_s)
    cell = _ms(entry.median_s) + ("" if over is None else f" ({over:.2f})")
    layers = entry.layers_by_choice
    if entry.fixed or not layers:
        return cell
    return f"{cell} {max(layers, key=lambda choice: layers[choice])}"


def _caption(panel: Panel) -> str:
    if not panel.crossing:
        return ""
    one, other = panel.crossing
    if panel.crosses_at is None:
        return f"{one} and {other} do not cross"
    return f"{one} and {other} cross at {panel.crosses_at:.0f} tokens"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"
