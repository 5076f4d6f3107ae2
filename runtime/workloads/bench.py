"""bench: time prompts of several lengths and decode, beside the limits of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from residency.policies.base import Conflict
from residency.policies.errors import WorkloadError
from residency.runtime.bench.measure import COLD, WARM, Plan
from residency.runtime.bench.report import BenchReport
from residency.runtime.engine import Engine
from residency.runtime.workloads.base import Workload


class Bench(Workload):
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
        if not config.lengths or min(config.lengths) < 1:
            reason = "each length must be at least 1, and there must be one"
            yield Conflict(
                (f"workload.lengths={config.lengths}",), reason, "workload.lengths=[64,512]"
            )
        elif len(set(config.lengths)) < len(config.lengths):
            reason = "a length is there twice; workload.repeats measures one several times"
            unique = ",".join(map(str, sorted(set(config.lengths))))
            key = f"workload.lengths={config.lengths}"
            yield Conflict((key,), reason, f"workload.lengths=[{unique}]")
        least = dict(decode_tokens=1, decode_context=1, batch=1, repeats=1, warmups=0)
        for name, bound in least.items():
            if (value := getattr(config, name)) < bound:
                reason = f"it must be at least {bound}"
                yield Conflict((f"workload.{name}={value}",), reason, f"workload.{name}={bound}")
        if config.pool not in (COLD, WARM):
            reason = f"it must be {COLD} or {WARM}"
            yield Conflict((f"workload.pool={config.pool}",), reason, f"workload.pool={COLD}")
        if not 0 <= config.seed < 1 << 63:
            reason = "it must be from 0 to 2^63 - 1"
            yield Conflict((f"workload.seed={config.seed}",), reason, "workload.seed=0")

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

        needed = self.plan.context
        if needed > engine.context:
            raise WorkloadError(
                f"workload.lengths={self.config.lengths}: the longest run needs a context of "
                f"{needed} tokens and there is one of {engine.context}; shorten it or raise "
                "model.context"
            )
        return measure(engine, self.plan, told or (lambda line: None))
