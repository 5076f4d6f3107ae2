"""bench: time prompts of several lengths and decode, beside the limits of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from residency.policies.base import Conflict
from residency.runtime.bench.measure import COLD, WARM, Plan
from residency.runtime.bench.report import BenchReport
from residency.runtime.engine import Engine
from residency.runtime.workloads.base import Measurement
from residency.runtime.workloads.checks import (
    check_context,
    context_faults,
    length_faults,
    number_faults,
    seed_faults,
)

if TYPE_CHECKING:
    from rich.table import Table


class Bench(Measurement):
    """Random prompts; what is measured does not depend on their text, unless routes do."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """lengths: prompt lengths, in tokens.
        decode_tokens: decode steps of each timed decode.
        decode_context: length of the prompt before them.
        batch: sequences of each timed decode, decoded together.
        repeats: timed runs of each kind.
        warmups: runs of each kind before them, not timed.
        pool: cold (slots are emptied before each prompt) or warm (as a decode left them).
        seed: of the prompts.
        """

        lengths: list[int] = field(default_factory=lambda: [16, 64, 256, 512, 1024, 2048, 4096])
        decode_tokens: int = 64
        decode_context: int = 128
        batch: int = 1
        repeats: int = 3
        warmups: int = 2
        pool: str = COLD
        seed: int = 0

    config: Config

    def faults(self) -> Iterator[Conflict]:
        config = self.config
        yield from length_faults(config.lengths)
        least = dict(decode_tokens=1, decode_context=1, batch=1, repeats=1, warmups=0)
        yield from number_faults(config, least)
        if config.pool not in (COLD, WARM):
            reason = f"it must be {COLD} or {WARM}"
            yield Conflict((f"workload.pool={config.pool}",), reason, f"workload.pool={COLD}")
        yield from seed_faults(config.seed)

    def context_faults(self, context: int) -> Iterator[Conflict]:
        yield from context_faults(self.config.lengths, self.plan.context, context)

    @property
    def batch(self) -> int:
        return self.config.batch

    @property
    def plan(self) -> Plan:
        config = self.config
        return Plan(
            tuple(config.lengths),
            config.decode_tokens,
            config.decode_context,
            config.batch,
            config.repeats,
            config.warmups,
            config.pool,
            config.seed,
        )

    def run(self, engine: Engine, told: Callable[[str], None] | None = None) -> BenchReport:
        """Measure `engine`; `told` hears of progress. Raises WorkloadError for too long prompts."""
        from residency.runtime.bench.run import measure

        check_context(self.config.lengths, self.plan.context, engine.context)
        return measure(engine, self.plan, told or (lambda line: None))

    def record(self, engine: Engine) -> None:
        """The first of its decodes."""
        from residency.runtime.bench.measure import Meter

        Meter(engine, self.plan).decode_once()

    def tables(self, report: BenchReport) -> list[Table]:
        from residency.runtime.bench.tables import bench_tables

        return bench_tables(report)

    def chart(self, report: BenchReport) -> bytes:
        from residency.runtime.bench.chart import chart_png

        return chart_png(report)
