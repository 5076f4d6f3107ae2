"""A trace's figures as a person reads them."""

from __future__ import annotations

from rich.table import Table

from residency.runtime.traces.following import shape_text
from residency.runtime.traces.info import Info, Shift
from residency.runtime.traces.trace import Trace


def info_tables(info: Info, trace: Trace, file: str) -> list[Table]:
    return [_figures(info, trace, file), _lengths(info), _sizes(info, trace)]


def _figures(info: Info, trace: Trace, file: str) -> Table:
    table = Table(title=f"{file}: {shape_text(trace.space)}", title_justify="left")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    skew, quarter = info.skew, "of the most used quarter of experts"
    rows = {
        "tokens": f"{info.tokens:,}, {info.decoded:,} of them decoded",
        "steps": f"{info.steps:,}",
        "requests": f"{info.requests:,}",
        "experts of a token that the one before used": f"{info.reuse:.1%}",
        "the same by chance": f"{info.by_chance:.1%}",
        "stack distance, 10 / 50 / 90 %": " / ".join(map(str, info.distances.values())) or "-",
        f"accesses {quarter}": f"{skew.top_share:.1%}",
        "experts in effect, of a layer": f"{skew.effective:.1f} of {trace.space.num_experts}",
        "experts never used": f"{skew.unused:,} of {trace.space.num_ids:,}",
        "favourites kept within / across requests": _overlap(info.request_shift),
        "favourites kept within / across domains": _overlap(info.domain_shift),
    }
    for name, cell in rows.items():
        table.add_row(name, cell)
    return table


def _overlap(shift: Shift | None) -> str:
    return "-" if shift is None else f"{shift.within:.1%} / {shift.across:.1%} of {shift.parts}"


def _lengths(info: Info) -> Table:
    table = Table("tokens of a chunk", *map(str, info.unions))
    table.add_row("experts of a layer", *(f"{share:.0%}" for share in info.unions.values()))
    return table


def _sizes(info: Info, trace: Trace) -> Table:
    sizes = [f"{size:,} ({size / trace.space.num_ids:.0%})" for size in info.lru]
    table = Table("slots of one LRU", *sizes)
    table.add_row("hits, by stack distance", *(f"{rate:.1%}" for rate in info.lru.values()))
    return table
