"""A dialogue: a person's messages and a model's answers, over one conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from residency.policies.errors import WorkloadError
from residency.runtime.chat_template import ChatTemplate, Message, require_tokenizer
from residency.runtime.conversation import Conversation, Turn
from residency.runtime.engine import Engine
from residency.runtime.history import History
from residency.runtime.sampling import Sampling, seed_of

GIB = 1 << 30


@dataclass(frozen=True)
class Manner:
    """How answers are given. overflow: as `History` takes it."""

    max_new_tokens: int
    sampling: Sampling
    overflow: str


class Dialogue:
    """Answers messages one after another, and can take turns back."""

    def __init__(self, engine: Engine, manner: Manner, system: str = "") -> None:
        """system: a message before all others, if not empty.

        Raises CheckpointError for a model without a tokenizer.
        """
        require_tokenizer(engine.tokenizer, engine.architecture.source)
        self.template = ChatTemplate.of(engine.tokenizer, engine.architecture.config)
        self._manner = manner
        self._conversation = Conversation(engine)
        self._answers = 0  # drawn so far: each has a seed of its own
        self.history = History(
            self.template, engine.context, manner.max_new_tokens, manner.overflow, system=system
        )

    @property
    def messages(self) -> list[Message]:
        """All that were said."""
        return [*self.history.system, *self.history.turns]

    def say(
        self,
        text: str,
        on_text: Callable[[str], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Turn:
        """Answer a message. on_text hears the answer piece by piece; interrupted: as `Generation`.

        An answer that breaks off leaves the history as it was. Raises WorkloadError for a message
        that the context has no room for.
        """
        prompt = self.history.ask(text)
        sampling = self._manner.sampling
        try:
            turn = self._conversation.say(
                prompt,
                max_new_tokens=self._manner.max_new_tokens,
                sampling=replace(sampling, seed=seed_of(sampling.seed, self._answers)),
                on_text=on_text,
                interrupted=interrupted,
            )
        except BaseException:
            self.history.take_back()
            raise
        self._answers += 1
        self.history.answer(turn.report.text)
        return turn

    def undo(self) -> str:
        """Take the newest turn back; its message. Raises WorkloadError where there is none."""
        if not self.history.turns:
            raise WorkloadError("there is no turn to take back")
        return self.history.take_back()

    def reset(self) -> None:
        """Take all turns back; the system message stays."""
        while self.history.turns:
            self.history.take_back()


def status(turn: Turn) -> str:
    """What a turn cost, in one line."""
    report = turn.report
    parts = [f"{turn.new} tokens new, {turn.cached} cached", f"TTFT {report.ttft_s * 1e3:,.0f} ms"]
    if report.step_s:
        rate = len(report.step_s) / sum(report.step_s)
        parts.append(f"{len(report.token_ids)} answered, {rate:,.1f} a second")
    hits = [
        f"{phase.phase} {phase.hit_rate:.0%}"
        for phase in report.phases
        if phase.hit_rate is not None
    ]
    parts.append(f"hits: {', '.join(hits)}")
    parts.append(f"{sum(phase.link_bytes for phase in report.phases) / GIB:.3f} GiB moved")
    if report.finish != "stop":
        ends = {"length": "ended by workload.max_new_tokens", "interrupted": "interrupted"}
        parts.append(ends[report.finish])
    return " | ".join(parts)
