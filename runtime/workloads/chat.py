"""chat: a person's conversation at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from residency.policies.base import Capability, Conflict, Need
from residency.runtime.dialogue import Dialogue, Manner
from residency.runtime.engine import Engine
from residency.runtime.history import DROP_OLDEST, OVERFLOWS
from residency.runtime.sampling import Sampling
from residency.runtime.workloads.base import Workload
from residency.runtime.workloads.checks import number_faults


class Chat(Workload):
    """Answers what is typed; `residency chat` runs it."""

    command: ClassVar[str] = "chat"
    interactive: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy, higher is more varied.
        top_p: draw from the smallest set of tokens with this probability together.
        seed: of the draws; every answer has its own from it.
        overflow: drop_oldest, or refuse: where a prompt and its answer are longer than the context,
            the oldest turns go, the system message stays.
        snapshots: most of them that are kept to go back, for models with recurrent states or
            windows; the oldest go first.
        """

        max_new_tokens: int = 256
        temperature: float = 0.7
        top_p: float = 1.0
        seed: int = 0
        overflow: str = DROP_OLDEST
        snapshots: int = 16

    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            Capability.READS_TEXT,
            because="it answers in text, and this model's weights are made up; `residency bench "
            "workload=conversation` measures such models",
            mend="model=demo",
        ),
    )
    config: Config

    @property
    def snapshots(self) -> int:
        return self.config.snapshots

    @property
    def manner(self) -> Manner:
        c = self.config
        sampling = Sampling(temperature=c.temperature, top_p=c.top_p, seed=c.seed)
        return Manner(c.max_new_tokens, sampling, c.overflow)

    def faults(self) -> Iterator[Conflict]:
        yield from self.manner.sampling.faults()
        yield from number_faults(self.config, dict(max_new_tokens=1, snapshots=0))
        if self.config.overflow not in OVERFLOWS:
            key, reason = f"workload.overflow={self.config.overflow}", "it must be "
            reason += " or ".join(OVERFLOWS)
            yield Conflict((key,), reason, f"workload.overflow={DROP_OLDEST}")

    def run(
        self, engine: Engine, told: Callable[[str], None] | None = None, *, system: str = ""
    ) -> Dialogue:
        """Begin a dialogue on `engine`; `told` hears what is particular about it.

        Raises CheckpointError for a model without a tokenizer.
        """
        dialogue = Dialogue(engine, self.manner, system)
        if told is not None:
            for note in (*engine.notes, *dialogue.template.notes):
                told(note)
        return dialogue
