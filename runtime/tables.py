"""Tables for a terminal: a report as a person reads it."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from residency.runtime.counters import Source
from residency.runtime.learning import Chosen
from residency.runtime.report import BatchReport, PhaseTotals, Report

MIB = 1 << 20


def print_report(out: Console, report: Report | BatchReport, prompts: list[str]) -> None:
    """The costs; before them the texts of several prompts, since that of one was streamed."""
    if isinstance(report, Report):
        out.print("\n")
        out.print(report_table(report))
        _print_choices(out, report.choices)
        return
    for prompt, one in zip(prompts, report.sequences, strict=True):
        out.print(prompt, end="", style="bold", markup=False, soft_wrap=True)
        out.print(one.text, end="\n\n", markup=False, soft_wrap=True)
    out.print(batch_table(report))
    _print_choices(out, report.choices)


def _print_choices(out: Console, choices: list[Chosen]) -> None:
    """What the prefill mode chose, and why, where it had a choice."""
    for chosen in choices:
        if chosen.reason:
            what = f"prefill, {chosen.layers} layers of chunks of {chosen.num_tokens} tokens"
            out.print(f"{what}: {chosen.choice} ({chosen.reason})", markup=False)


def report_table(report: Report) -> Table:
    """Times, lookups and bytes of one run, a column for each phase."""
    title = f"{report.prompt_tokens} prompt tokens, {len(report.token_ids)} new ({report.finish})"
    return _phase_table(title, _ttft(report.ttft_s), _tpot(report.tpot_s), report.phases)


def batch_table(report: BatchReport) -> Table:
    """As `report_table`, of all sequences together."""
    sequences = report.sequences
    prompts = sum(one.prompt_tokens for one in sequences)
    new = sum(len(one.token_ids) for one in sequences)
    title = f"{len(sequences)} sequences, {prompts} prompt tokens, {new} new"
    if report.tokens_per_s is not None:
        title = f"{title}, {report.tokens_per_s:.1f} tokens/s decoded"
    ttft = f"TTFT {sequences[0].ttft_s * 1e3:.1f} to {sequences[-1].ttft_s * 1e3:.1f} ms"
    return _phase_table(title, ttft, _tpot(report.tpot_s), report.phases)


def _phase_table(title: str, ttft: str, tpot: str, phases: list[PhaseTotals]) -> Table:
    table = Table(title=title, title_justify="left", show_footer=False)
    table.add_column("")
    for phase in phases:
        table.add_column(phase.phase, justify="right")
    table.add_row("time", ttft, tpot)
    for name, cell in _ROWS.items():
        table.add_row(name, *map(cell, phases))
    for source in Source:
        cells = [_mib(phase.bytes.get(source, 0)) for phase in phases]
        table.add_row(f"{source} bytes", *cells)
    return table


def _ttft(seconds: float) -> str:
    return f"TTFT {seconds * 1e3:.1f} ms"


def _tpot(seconds: float | None) -> str:
    return "-" if seconds is None else f"TPOT {seconds * 1e3:.2f} ms"


def _ahead(phase: PhaseTotals) -> str:
    if not phase.ahead:
        return "-"
    return f"{phase.ahead:,}: {phase.ahead_in_time:,} in time, {phase.ahead_used:,} used"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes else "-"


_ROWS: dict[str, Callable[[PhaseTotals], str]] = {
    "phase total": lambda phase: f"{phase.seconds:.3f} s",
    "expert lookups": lambda phase: f"{phase.lookups:,}",
    "hits": lambda phase: f"{phase.hits:,}",
    "misses": lambda phase: f"{phase.misses:,}",
    "hit rate": lambda phase: _share(phase.hit_rate),
    "evictions": lambda phase: f"{phase.evictions:,}",
    "fetched": lambda phase: f"{phase.fetched:,}",
    "fetched ahead of routers": lambda phase: _ahead(phase),
    "computed on host": lambda phase: f"{phase.computed:,}",
    "link share of time": lambda phase: _share(phase.link_share),
}
