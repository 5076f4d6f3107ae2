"""Scripts: what is said in each turn of the sessions, as token ids, before anything is timed.

All that is measured speaks the same script, so modes differ by what is compared alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from residency.runtime.chat_template import ChatTemplate
from residency.runtime.conversation import Conversation
from residency.runtime.engine import Engine
from residency.runtime.history import History
from residency.runtime.sampling import Sampling, seed_of
from residency.runtime.sessions.session import Session

RECORDED, GENERATED = "recorded", "generated"


@dataclass(frozen=True)
class Line:
    """One turn. prompt: all of it, the conversation before included. answer: at least one token.

    dropped: turns of the session that the prompt leaves out, the oldest ones.
    """

    session: str
    turn: int  # from 1
    prompt: list[int]
    answer: list[int]
    dropped: int


Script = list[Line]  # of one session
Reply = Callable[[History, list[int], str | None], tuple[list[int], str]]


@dataclass(frozen=True)
class Said:
    """How sessions become scripts; the workload's keys."""

    max_turns: int
    max_new_tokens: int
    replies: str
    overflow: str
    sampling: Sampling

    def scripts(
        self, engine: Engine, template: ChatTemplate, sessions: Sequence[Session]
    ) -> list[Script]:
        """Raises WorkloadError for a turn that the context has no room for, by its session."""
        scripts = []
        for session in sessions:
            reply = self._recorded if self.replies == RECORDED else self._generator(engine)
            history = History(
                template,
                engine.context,
                self.max_new_tokens,
                self.overflow,
                system=session.system,
                name=f"session {session.name}",
            )
            scripts.append(list(self._lines(session, history, reply)))
        return scripts

    def _lines(self, session: Session, history: History, reply: Reply) -> Iterator[Line]:
        exchanges = session.exchanges[: self.max_turns or None]
        for turn, exchange in enumerate(exchanges, 1):
            prompt = history.ask(exchange.user)
            answer, text = reply(history, prompt, exchange.assistant)
            history.answer(text)
            yield Line(session.name, turn, prompt, answer, history.dropped)

    def _recorded(
        self, history: History, prompt: list[int], recorded: str | None
    ) -> tuple[list[int], str]:
        """The first tokens of the recorded answer. Where none is recorded, as at a session's end,
        the newest token of the prompt stands for it: a turn has an answer.
        """
        said = recorded or ""
        ids, text = history.template.answer(history.messages, said, self.max_new_tokens)
        return ids or prompt[-1:], text

    def _generator(self, engine: Engine) -> Reply:
        """The model's own answers, in a conversation of one session."""
        conversation, given = Conversation(engine), 0

        def reply(history: History, prompt: list[int], _: str | None) -> tuple[list[int], str]:
            nonlocal given
            own = self.sampling
            drawn = Sampling(
                temperature=own.temperature, top_p=own.top_p, seed=seed_of(own.seed, given)
            )
            given += 1
            turn = conversation.say(prompt, max_new_tokens=self.max_new_tokens, sampling=drawn)
            # A stop token at once is no answer: the end of the turn stands for it.
            return turn.report.token_ids or prompt[-1:], turn.report.text

        return reply
