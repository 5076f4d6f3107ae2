"""Conversations as a person reads them."""

from __future__ import annotations

from rich.table import Table

from residency.runtime.bench.turns_report import ConversationReport, Entry, Row

MIB = 1 << 20


def turns_tables(report: ConversationReport) -> list[Table]:
    """A row for each turn under the combination's own mode; then the modes side by side."""
    return [_turns_table(report), _sums_table(report)]


def _turns_table(report: ConversationReport) -> Table:
    own = report.labels[0]
    table = Table(title=report.title, title_justify="left")
    table.add_column("session", overflow="fold")
    columns = ("turn", "cached", "new", "answer", "TTFT ms", "floor", "ratio", "TPOT ms")
    for column in (*columns, "hits", "decode", "routed", "link MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.caption = (
        "cached, new, answer: tokens; hits, decode: hit rates of prefill and decode; routed: MiB "
        "of the experts that the new tokens were routed to"
    )
    for row in report.rows:
        table.add_row(*_cells(row, row.entries[own]))
    return table


def _cells(row: Row, entry: Entry) -> list[str]:
    tpot, over = entry.turn.report.tpot_s, entry.over_floor
    return [
        row.line.session if row.line.turn == 1 else "",
        str(row.line.turn),
        str(row.turn.cached),
        str(row.turn.new),
        str(len(row.line.answer)),
        _ms(entry.ttft_s.median),
        "-" if entry.floor is None else _ms(entry.floor.own_s),
        "-" if over is None else f"{over:.2f}",
        "-" if tpot is None else _ms(tpot),
        _rate(entry.samples.hit_rate),
        _rate(entry.decode.hit_rate),
        f"{entry.routed_bytes / MIB:,.0f}",
        f"{entry.samples.link_bytes / MIB:,.0f}",
    ]


def _sums_table(report: ConversationReport) -> Table:
    table = Table(title=f"All {len(report.rows)} turns together", title_justify="left")
    table.add_column("prefill")
    for column in ("TTFT s", "floor s", "decode s", "link GiB", "TTFT over routed bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, one in report.sums.items():
        fit = "-"
        if one.fit is not None and one.correlation is not None:
            fit = f"{one.fit.slope * 1e3 * MIB:.3f} ms/MiB, r {one.correlation:.2f}"
        floor = "-" if one.floor_s is None else f"{one.floor_s:.3f}"
        moved = f"{one.link_bytes / (1 << 30):.3f}"
        table.add_row(label, f"{one.ttft_s:.3f}", floor, f"{one.decode_s:.3f}", moved, fit)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"
