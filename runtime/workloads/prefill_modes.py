"""prefill_modes: time to first token over the chunk's length, for prefill modes that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from residency.policies.base import Conflict, Need
from residency.policies.prefill import PrefillMode
from residency.runtime.bench.measure import COLD, WARM
from residency.runtime.engine import Engine
from residency.runtime.workloads.base import Measurement
from residency.runtime.workloads.checks import (
    check_context,
    context_faults,
    length_faults,
    list_faults,
    mode_faults,
    mode_labels,
    mode_needs,
    number_faults,
    seed_faults,
)

if TYPE_CHECKING:
    from rich.table import Table

    from residency.runtime.bench.modes import Contest
    from residency.runtime.bench.modes_report import ModesReport

EVERY_LENGTH = "max_tokens=1048576"
MODES = (
    "always_stream", "hit_d2d", "in_place", f"demand {EVERY_LENGTH}", "speculate", "auto",
)  # fmt: skip


class PrefillModes(Measurement):
    """Modes take turns on one pool, so that what drifts hits all of them alike.

    The combination's own prefill mode says how chunks and staging are cut, for all of them, and
    prefills the conversations that come before.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """lengths: of the timed chunks, in tokens.
        modes: options of the group prefill, each with values of its keys behind it, if any, as in
            "demand max_tokens=64".
        pools: cold (slots are emptied before each chunk), warm (as a decode left them), or both.
        prefix: tokens in the KV cache before the chunk, 0 for none; several are drawn in rows.
        crossing: two of the modes, whose lines' crossing is looked for; [] for none.
        decode_tokens: decode steps before a warm pool's chunks; the end of a prefix, too.
        decode_context: length of the prompt before them where there is no prefix.
        repeats: timed turns of each mode.
        warmups: turns of each mode at each length before them, not timed, in the first of `pools`.
        seed: of the prompts.
        """

        lengths: list[int] = field(default_factory=lambda: [8 << i for i in range(11)])
        modes: list[str] = field(
            default_factory=lambda: list(MODES), metadata={"option_of": "prefill"}
        )
        pools: list[str] = field(default_factory=lambda: [COLD, WARM])
        prefix: list[int] = field(default_factory=lambda: [0])
        crossing: list[str] = field(default_factory=lambda: ["always_stream", "demand"])
        decode_tokens: int = 64
        decode_context: int = 128
        repeats: int = 2
        warmups: int = 2
        seed: int = 0

    config: Config

    def __init__(self, config: Config, modes: Sequence[PrefillMode]) -> None:
        """modes: those that `config.modes` describes, in that order."""
        super().__init__(config)
        self.modes = dict(zip(mode_labels(config.modes), modes, strict=True))

    def requirements(self) -> tuple[Need, ...]:
        """What its modes need of the cache and of decode, each said once."""
        return mode_needs(self.modes)

    def faults(self) -> Iterator[Conflict]:
        config = self.config
        yield from length_faults(config.lengths)
        yield from self._mode_faults()
        yield from self._pool_faults()
        yield from self._prefix_faults()
        least = dict(decode_tokens=1, decode_context=1, repeats=1, warmups=0)
        yield from number_faults(config, least)
        yield from seed_faults(config.seed)

    def context_faults(self, context: int) -> Iterator[Conflict]:
        yield from context_faults(self.config.lengths, self.contest.context, context)

    def _mode_faults(self) -> Iterator[Conflict]:
        config, labels = self.config, list(self.modes)
        yield from list_faults("workload.modes", config.modes, "[always_stream,demand]", "mode")
        yield from mode_faults(config.modes, self.modes.values())
        crossing = config.crossing
        if crossing and (len(set(crossing)) != 2 or not set(crossing) <= set(labels)):
            reason = f"it must be two of the modes {', '.join(labels)}, or none"
            yield Conflict((f"workload.crossing={crossing}",), reason, "workload.crossing=[]")

    def _pool_faults(self) -> Iterator[Conflict]:
        pools = self.config.pools
        if set(pools) - {COLD, WARM}:
            reason = f"each must be {COLD} or {WARM}"
            yield Conflict((f"workload.pools={pools}",), reason, f"workload.pools=[{COLD},{WARM}]")
        else:
            yield from list_faults("workload.pools", pools, f"[{COLD},{WARM}]", "pool")

    def _prefix_faults(self) -> Iterator[Conflict]:
        prefix, decoded = self.config.prefix, self.config.decode_tokens
        if any(length != 0 and length <= decoded for length in prefix):
            reason = f"it must be 0, or more than the {decoded} decoded tokens that it ends with"
            mend = f"workload.prefix=[{decoded + 1}]"
            yield Conflict((f"workload.prefix={prefix}",), reason, mend)
        else:
            yield from list_faults("workload.prefix", prefix, "[0]", "prefix")

    @property
    def contest(self) -> Contest:
        from residency.runtime.bench.modes import Contest

        config = self.config
        names = (field.name for field in fields(self.Config) if field.name != "modes")
        values = {name: getattr(config, name) for name in names}
        return Contest(modes=self.modes, **values)

    def run(self, engine: Engine, told: Callable[[str], None] | None = None) -> ModesReport:
        """Measure `engine`; `told` hears of progress. Raises WorkloadError for too long chunks."""
        from residency.runtime.bench.modes import measure_modes

        contest = self.contest
        check_context(self.config.lengths, contest.context, engine.context)
        return measure_modes(engine, contest, told or (lambda line: None))

    def record(self, engine: Engine) -> None:
        """The decode that fills a warm pool."""
        from residency.runtime.bench.measure import RandomPrompts

        prompt = RandomPrompts(engine, self.config.seed).prompt(self.config.decode_context)
        new = self.config.decode_tokens + 1  # the first is prefill's
        engine.generate(prompt, max_new_tokens=new, ignore_eos=True)

    def tables(self, report: ModesReport) -> list[Table]:
        from residency.runtime.bench.modes_tables import modes_tables

        return modes_tables(report)

    def chart(self, report: ModesReport) -> bytes:
        from residency.runtime.bench.modes_chart import modes_png

        return modes_png(report)
