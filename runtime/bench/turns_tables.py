"""Conversations as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from residency.runtime.bench.turns_report import ConversationReport, Entry, Row

MIB = 1 << 20


def turns_tables(report: ConversationReport) -> list[Table]:
    """A row for each turn under the combination's own mode; then the modes side by side."""
    return [*_turns_tables(report), _sums_table(report)]


def _turns_tables(report: ConversationReport) -> Iterator[Table]:
    """One a session."""
    own = report.labels[0]
    for session, rows in groupby(report.rows, lambda row: row.line.session):
        table = Table(title=f"{session}: {report.title}", title_justify="left", box=SIMPLE_HEAD)
        columns = ("turn", "cached", "new", "TTFT ms", "floor", "ratio", "TPOT", "hits", "decode")
        for column in (*columns, "link MiB"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*_cells(row, row.entries[own]))
        yield table


def _cells(row: Row, entry: Entry) -> list[str]:
    tpot, over = entry.turn.report.tpot_s, entry.over_floor
    return [
        str(row.line.turn),
        str(row.turn.cached),
        str(row.turn.new),
        _ms(entry.ttft_s.median),
        "-" if entry.floor is None else _ms(entry.floor.own_s),
        "-" if over is None else f"{over:.2f}",
        "-" if tpot is None else _ms(tpot),
        _rate(entry.samples.hit_rate),
        _rate(entry.decode.hit_rate),
        f"{entry.samples.link_bytes / MIB:,.1f}",
    ]


def _sums_table(report: ConversationReport) -> Table:
    title = f"All {len(report.rows)} turns together"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("prefill")
    for column in ("TTFT s", "floor s", "decode s", "link GiB", "ms / routed MiB", "r"):
        table.add_column(column, justify="right", no_wrap=True)
    table.caption = (
        "hits, decode: hit rates of prefill and decode; routed: the experts that a turn's new "
        "tokens were routed to; r: how well TTFT is a line over them"
    )
    for label, one in report.sums.items():
        floor = "-" if one.floor_s is None else f"{one.floor_s:.3f}"
        slope = "-" if one.fit is None else f"{one.fit.slope * 1e3 * MIB:.3f}"
        fits = "-" if one.correlation is None else f"{one.correlation:.2f}"
        moved = f"{one.link_bytes / (1 << 30):.3f}"
        table.add_row(label, f"{one.ttft_s:.3f}", floor, f"{one.decode_s:.3f}", moved, slope, fits)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"
