"""conversation: sessions of several turns, whose prefix stays in the KV cache between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from residency.policies.base import Capability, Conflict, Need
from residency.policies.prefill import PrefillMode
from residency.runtime.chat_template import ChatTemplate, require_tokenizer
from residency.runtime.engine import Engine
from residency.runtime.history import OVERFLOWS, REFUSE
from residency.runtime.sampling import Sampling
from residency.runtime.sessions.session import read_sessions
from residency.runtime.workloads.base import Measurement
from residency.runtime.workloads.checks import (
    list_faults,
    mode_faults,
    mode_labels,
    mode_needs,
    number_faults,
    seed_faults,
)

if TYPE_CHECKING:
    from rich.table import Table

    from residency.runtime.bench.script import Said
    from residency.runtime.bench.turns_report import ConversationReport

RECORDED, GENERATED = REPLIES = ("recorded", "generated")
FEWEST_SNAPSHOTS = (
    3  # a turn's beginning, its prompt's end and its answer's: it is run several times
)


class Conversation(Measurement):
    """Each turn's new tokens are prefilled behind what is cached, by several modes in turn."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """path: a JSONL file, one session a line; empty for the sample that comes with the package.
        sessions: the first so many of them; 0 for all.
        max_turns: the first so many turns of each; 0 for all.
        max_new_tokens: most tokens of an answer; recorded ones are cut there.
        replies: recorded (the answers of the file, token by token) or generated (the model's own).
        temperature: of generated answers; 0 is greedy.
        seed: of their draws.
        overflow: refuse, or drop_oldest: where a prompt and its answer are longer than the context,
            the oldest turns go, the system message stays.
        modes: prefill modes that take turns with the combination's own, as in
            "demand max_tokens=64"; [] for none.
        snapshots: most of them that are kept to go back, for models with recurrent states or
            windows; the oldest go first.
        repeats: timed runs of each turn under each mode.
        warmups: runs of each before them, not timed.
        """

        path: str = ""
        sessions: int = 4
        max_turns: int = 0
        max_new_tokens: int = 32
        replies: str = RECORDED
        temperature: float = 0.0
        seed: int = 0
        overflow: str = REFUSE
        modes: list[str] = field(
            default_factory=lambda: ["always_stream"], metadata={"option_of": "prefill"}
        )
        snapshots: int = 16
        repeats: int = 3
        warmups: int = 2

    config: Config

    def __init__(self, config: Config, modes: Sequence[PrefillMode]) -> None:
        """modes: those that `config.modes` describes, in that order."""
        super().__init__(config)
        self.modes = dict(zip(mode_labels(config.modes), modes, strict=True))

    @property
    def snapshots(self) -> int:
        return self.config.snapshots

    def requirements(self) -> tuple[Need, ...]:
        """What its modes need, and for answers of the model's own a tokenizer."""
        own = Need(
            Capability.READS_TEXT,
            because="the answers are to be the model's own, and its weights are made up",
            mend=f"workload.replies={RECORDED}",
        )
        return (*mode_needs(self.modes), *([own] if self.config.replies == GENERATED else []))

    def faults(self) -> Iterator[Conflict]:
        config = self.config
        least = dict(
            sessions=0,
            max_turns=0,
            max_new_tokens=1,
            snapshots=FEWEST_SNAPSHOTS,
            repeats=1,
            warmups=0,
        )
        yield from number_faults(config, least)
        for name, values in (("replies", REPLIES), ("overflow", OVERFLOWS)):
            if (value := getattr(config, name)) not in values:
                reason = f"it must be {' or '.join(values)}"
                yield Conflict(
                    (f"workload.{name}={value}",), reason, f"workload.{name}={values[0]}"
                )
        if config.modes:
            yield from list_faults("workload.modes", config.modes, "[]", "mode")
        yield from mode_faults(config.modes, self.modes.values())
        yield from seed_faults(config.seed)
        if config.replies == RECORDED and (config.temperature, config.seed) != (0, 0):
            keys = ("workload.temperature", "workload.seed", f"workload.replies={RECORDED}")
            reason = "recorded answers are not drawn, so neither would have an effect"
            yield Conflict(keys, reason, f"workload.replies={GENERATED}")
        yield from self._sampling.faults()

    @property
    def _sampling(self) -> Sampling:
        return Sampling(temperature=self.config.temperature, seed=self.config.seed)

    @property
    def said(self) -> Said:
        from residency.runtime.bench.script import Said

        config = self.config
        return Said(
            max_turns=config.max_turns,
            max_new_tokens=config.max_new_tokens,
            replies=config.replies,
            overflow=config.overflow,
            sampling=self._sampling,
        )

    def run(self, engine: Engine, told: Callable[[str], None] | None = None) -> ConversationReport:
        """Measure `engine`; `told` hears of progress. Raises WorkloadError for a file that cannot
        be read, and before anything is timed for a session that the context has no room for.
        """
        from residency.runtime.bench.turns import measure_conversations

        config = self.config
        if config.replies == GENERATED:
            require_tokenizer(engine.tokenizer, engine.architecture.source)
        sessions = read_sessions(config.path)[: config.sessions or None]
        template = ChatTemplate.of(engine.tokenizer, engine.architecture.config)
        return measure_conversations(
            engine,
            self.said.scripts(engine, template, sessions),
            {
                name: mode
                for name, mode in self.modes.items()
                if name != engine.policies.prefill.name
            },
            repeats=config.repeats,
            warmups=config.warmups,
            keys={**asdict(config), "path": config.path or "the sample"},
            notes=template.notes,
            told=told or (lambda line: None),
        )

    def tables(self, report: ConversationReport) -> list[Table]:
        from residency.runtime.bench.turns_tables import turns_tables

        return turns_tables(report)

    def chart(self, report: ConversationReport) -> bytes:
        from residency.runtime.bench.turns_chart import turns_png

        return turns_png(report)
