"""A bench report as a person reads it."""

from __future__ import annotations

from rich.table import Table

from residency.runtime.bench.report import BenchReport, Point

GB = 1e9


def bench_tables(report: BenchReport) -> list[Table]:
    return [_prefill_table(report), _decode_table(report)]


def _prefill_table(report: BenchReport) -> Table:
    table = Table(title=f"TTFT: {report.title}", title_justify="left")
    for column in ("tokens", "ms", "resident", "floor", "ratio", "hits", "link GB", "busy"):
        table.add_column(column, justify="right", no_wrap=True)
    table.caption = "resident: with every expert in a slot; busy: the link's share of the time"
    for point in report.prefill:
        table.add_row(*_prefill_row(point))
    return table


def _prefill_row(point: Point) -> list[str]:
    samples, floor = point.samples, point.floor
    limits = ["-", "-", "-"]
    if floor is not None:
        over = samples.seconds.median / floor.own_s
        limits = [_ms(floor.compute_s), _ms(floor.own_s), f"{over:.2f}"]
    counts = [_rate(samples.hit_rate), _gb(samples.link_bytes), _rate(samples.link_share)]
    return [str(samples.tokens), _ms(samples.seconds.median), *limits, *counts]


def _decode_table(report: BenchReport) -> Table:
    samples, floor = report.decode.samples, report.decode.floor
    batch = samples.batch
    what = "decode, a token" if batch == 1 else f"decode, a step of {batch} sequences"
    table = Table(what, "", title_justify="left")
    table.columns[1].justify = "right"
    step = samples.step_s.median
    rows = {
        "ms": _ms(samples.per_token.median),
        "ms, median step": _ms(step),
        "tokens a second": f"{samples.tokens_per_s.median:,.1f}",
        "resident, ms": "-" if floor is None else _ms(floor.compute_s),
        "floor, ms": "-" if floor is None else _ms(floor.own_s),
        "hit rate": _rate(samples.hit_rate),
        "link MB": f"{samples.link_bytes / samples.tokens / 1e6:.1f}",
        "link share": _rate(samples.link_share),
        "link GB/s": f"{report.link.rate.median / GB:.1f}",
        "every expert once over the link, ms": _ms(report.whole_stream_s),
    }
    for name, cell in rows.items():
        table.add_row(name, cell)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3f}"
