"""History: the messages of a conversation, and the prompt that they make within the context."""

from __future__ import annotations

from residency.policies.errors import WorkloadError
from residency.runtime.chat_template import ChatTemplate, Message

REFUSE, DROP_OLDEST = "refuse", "drop_oldest"
OVERFLOWS = (REFUSE, DROP_OLDEST)


class History:
    """Asked and answered by turns. dropped: of the oldest turns, how many prompts leave out.

    The rule where a prompt and its answer would be longer than the context: `refuse`, or
    `drop_oldest`: whole turns go, the oldest first and no more than must, never the system message
    nor the newest question. The prompt begins otherwise then, so what is cached serves up to the
    system message.
    """

    def __init__(
        self,
        template: ChatTemplate,
        context: int,
        answer_tokens: int,
        overflow: str,
        *,
        system: str = "",
        name: str = "the conversation",
    ) -> None:
        """context: most tokens of a prompt with an answer of `answer_tokens`.
        system: a message before all others, if not empty. name: for refusals.
        """
        self.template = template
        self.dropped = 0
        self.turns: list[Message] = []  # user and assistant, alternating
        self._limit = context - answer_tokens
        self._answer_tokens = answer_tokens
        self._overflow = overflow
        self._name = name
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []

    @property
    def messages(self) -> list[Message]:
        """Those that the next prompt has."""
        return [*self.system, *self.turns[2 * self.dropped :]]

    @property
    def num_turns(self) -> int:
        """Asked so far, those that were dropped included."""
        return (len(self.turns) + 1) // 2

    def ask(self, content: str) -> list[int]:
        """The prompt behind the user's next message. Raises WorkloadError, and then the message
        is not part of the history.
        """
        before = self.dropped
        self.turns.append({"role": "user", "content": content})
        try:
            return self._prompt()
        except WorkloadError:
            self.turns.pop()
            self.dropped = before
            raise

    def answer(self, content: str) -> None:
        """What the assistant said to the newest message."""
        self.turns.append({"role": "assistant", "content": content})

    def take_back(self) -> str:
        """Forget the newest turn, whether it is answered or not; its message. There is one."""
        del self.turns[2 * (self.num_turns - 1) + 1 :]
        self.dropped = 0  # what was left out may fit again
        return self.turns.pop()["content"]

    def _prompt(self) -> list[int]:
        try:
            ids = self.template.ids(self.messages)
        except WorkloadError as error:
            raise WorkloadError(f"{self._name}, turn {self.num_turns}: {error}") from error
        while len(ids) > self._limit:
            if self._overflow == REFUSE or self.dropped + 1 == self.num_turns:
                raise WorkloadError(self._refusal(len(ids)))
            self.dropped += 1
            ids = self.template.ids(self.messages)
        return ids

    def _refusal(self, num_tokens: int) -> str:
        context = self._limit + self._answer_tokens
        mend = f"raise model.context, or set workload.overflow={DROP_OLDEST}"
        if self._overflow == DROP_OLDEST:
            mend = "that turn alone is too long for workload.overflow; shorten it, or raise "
            mend += "model.context"
        return (
            f"{self._name}, turn {self.num_turns}: {num_tokens} tokens and "
            f"workload.max_new_tokens={self._answer_tokens} are more than the context of "
            f"{context} has room for; {mend}"
        )
