"""A plan as tables: what fits, what was chosen and why, and what it is predicted to take."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from residency.runtime.forecast.advice import Advice, PromptTimes
from residency.runtime.forecast.prefill import Prompt

GIB = 1 << 30


def heading(advice: Advice) -> str:
    return f"{advice.model}: {advice.budget.told}"


def plan_tables(advice: Advice) -> Iterator[Table]:
    yield _memory_table(advice)
    yield _choices_table(advice)
    if advice.prompts:
        yield _prompts_table(advice)
    if any(one.steps for one in advice.decodes):
        yield _decode_table(advice)


def plan_lines(advice: Advice) -> Iterator[str]:
    """What stands below the tables."""
    longest = max((one.cold.num_tokens for one in advice.prompts), default=0)
    if advice.exact and longest > advice.measured_tokens:
        yield (
            f"compute of more than {advice.measured_tokens:,} tokens was not measured; it is taken "
            "in proportion, which is rough and mostly too much"
        )
    for source in advice.sources:
        yield f"predicted, not measured, from: {source}"
    yield advice.routes
    if advice.memory.num_slots:
        yield f"estimated hit rate of decode in these slots: {advice.hit_rate:.1%}"
    if advice.unknown:
        yield f"no times are predicted: {advice.unknown}"
    for one in advice.decodes:
        if one.why_not:
            yield f"decode={one.target} is not predicted: {one.why_not}"
    for warning in advice.warnings:
        yield f"warning: {warning}"


def _memory_table(advice: Advice) -> Table:
    memory = advice.memory
    table = Table()
    table.add_column("what")
    table.add_column("takes", justify="right")
    table.add_column("where")
    place = "host" if advice.budget.device_bytes is None else "GPU"
    experts = memory.bank_bytes // memory.row_bytes
    rows: list[tuple[str, int, str]] = [
        (f"all {experts:,} experts", memory.bank_bytes, "host"),
        ("host tables", memory.table_bytes, "host, or the checkpoint's files"),
        ("other weights", memory.weight_bytes, place),
        (f"KV of {advice.context:,} tokens", memory.kv_bytes, place),
        ("workspace of the largest chunk", memory.workspace_bytes, place),
        ("staging", memory.staging_bytes, place),
        (f"{memory.num_slots:,} slots", memory.pool_bytes, place),
        ("snapshots of a conversation", memory.snapshot_bytes, place),
        ("the cache policy's state", memory.policy_bytes, place),
        ("graphs of decode steps", memory.graph_bytes, place),
        ("reserve: context and libraries", advice.reserved_bytes, place),
    ]
    for name, size, where in rows:
        if size:
            table.add_row(name, f"{size / GIB:,.2f} GiB", where)
    if memory.num_slots:
        table.caption = (
            f"{advice.share:.1%} of the experts have a slot; a token touches {advice.cycle:,}, so "
            f"the pool holds {memory.num_slots / advice.cycle:.1f} tokens' worth"
        )
        table.caption_justify = "left"
    return table


def _choices_table(advice: Advice) -> Table:
    table = Table("recommended", "why", title="Recommended", title_justify="left")
    for override, reason in advice.choices:
        table.add_row(override, reason)
    return table


def _prompts_table(advice: Advice) -> Table:
    table = Table(title="Time to the first token, predicted (ms)", title_justify="left")
    table.add_column("prompt tokens", justify="right")
    modes = list(dict.fromkeys(one.mode for one in advice.prompts))
    for mode in modes:
        for pool in ("empty slots", "warm slots"):
            table.add_column(f"{mode}, {pool}", justify="right")
    table.add_column(f"over the link ({modes[0]}, empty)", justify="right")
    lengths = sorted({one.cold.num_tokens for one in advice.prompts})
    for length in lengths:
        own = [one for one in advice.prompts if one.cold.num_tokens == length]
        cells = [cell for one in own for cell in _pair(one)]
        table.add_row(f"{length:,}", *cells, f"{own[0].cold.link_bytes / 1e9:,.2f} GB")
    return table


def _pair(one: PromptTimes) -> tuple[str, str]:
    return _milliseconds(one.cold), _milliseconds(one.warm)


def _milliseconds(prompt: Prompt) -> str:
    return (
        f"{prompt.seconds * 1e3:,.0f}" if prompt.seconds >= 0.1 else f"{prompt.seconds * 1e3:.1f}"
    )


def _decode_table(advice: Advice) -> Table:
    known = [one for one in advice.decodes if one.steps]
    table = Table(title="A decoded token, predicted (ms)", title_justify="left")
    table.add_column("hit rate", justify="right")
    for one in known:
        table.add_column(f"decode={one.target}", justify="right")
    rates = sorted({step.hit_rate for one in known for step in one.steps})
    if advice.memory.num_slots:
        table.add_row(
            f"{advice.hit_rate:.1%} (estimated for these slots)",
            *(f"{one.estimated.seconds * 1e3:.2f}" if one.estimated else "-" for one in known),
        )
    for rate in rates:
        cells = []
        for one in known:
            at = [step for step in one.steps if step.hit_rate == rate or len(one.steps) == 1]
            cells.append(f"{at[0].seconds * 1e3:.2f}" if at else "-")
        table.add_row(f"{rate:.0%}", *cells)
    return table
