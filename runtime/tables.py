"""Tables for a terminal: a report as a person reads it."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from residency.runtime.counters import Source
from residency.runtime.report import PhaseTotals, Report

MIB = 1 << 20


def report_table(report: Report) -> Table:
    """Times, lookups and bytes of one run, a column for each phase."""
    title = f"{report.prompt_tokens} prompt tokens, {len(report.token_ids)} new ({report.finish})"
    table = Table(title=title, title_justify="left", show_footer=False)
    table.add_column("")
    for phase in report.phases:
        table.add_column(phase.phase, justify="right")
    for name, cell in _ROWS.items():
        table.add_row(name, *(cell(report, phase) for phase in report.phases))
    for source in Source:
        cells = [_mib(phase.bytes.get(source, 0)) for phase in report.phases]
        table.add_row(f"{source} bytes", *cells)
    return table


def _time(report: Report, phase: PhaseTotals) -> str:
    if phase.phase == "prefill":
        return f"TTFT {report.ttft_s * 1e3:.1f} ms"
    return "-" if report.tpot_s is None else f"TPOT {report.tpot_s * 1e3:.2f} ms"


def _hit_rate(report: Report, phase: PhaseTotals) -> str:
    return _share(phase.hit_rate)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes else "-"


_ROWS: dict[str, Callable[[Report, PhaseTotals], str]] = {
    "time": _time,
    "phase total": lambda report, phase: f"{phase.seconds:.3f} s",
    "expert lookups": lambda report, phase: f"{phase.lookups:,}",
    "hits": lambda report, phase: f"{phase.hits:,}",
    "misses": lambda report, phase: f"{phase.misses:,}",
    "hit rate": _hit_rate,
    "evictions": lambda report, phase: f"{phase.evictions:,}",
    "fetched": lambda report, phase: f"{phase.fetched:,}",
    "computed on host": lambda report, phase: f"{phase.computed:,}",
    "link share of time": lambda report, phase: _share(phase.link_share),
}
