"""Chat templates: messages in, token ids out, as the model's own tokenizer renders them."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from typing import Any, TypedDict

from residency.policies.errors import CheckpointError, WorkloadError

# For tokenizers without a template of their own: a line for each message, its role before it.
ROLE_LINES = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Message(TypedDict):
    """role: system, user or assistant."""

    role: str
    content: str


class ChatTemplate:
    """Renders messages for one tokenizer. notes: lines for a report, where it is not the model's.

    vocabulary: token ids are taken modulo this; for a tokenizer that stands in for none.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._template = tokenizer.chat_template or ROLE_LINES
        self.notes: list[str] = []
        if vocabulary is not None:
            self.notes.append(
                "token ids: the model has no tokenizer, so the demo model's reads the messages, "
                "modulo the vocabulary; lengths and repetitions are real, meaning is not"
            )
        elif not tokenizer.chat_template:
            self.notes.append(
                "chat template: the tokenizer has none, so each message is a line behind its role"
            )

    @classmethod
    def of(cls, tokenizer: Any | None, config: Any) -> ChatTemplate:
        """For a model; the demo model's tokenizer stands in where there is none."""
        if tokenizer is not None:
            return cls(tokenizer)
        from transformers import AutoTokenizer

        with importlib.resources.as_file(importlib.resources.files("residency.demo")) as folder:
            stand_in = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
        return cls(stand_in, int(config.get_text_config().vocab_size))

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for the next answer. Raises WorkloadError where the template refuses."""
        return self._read(self._rendered(messages, reply=True))

    def answer(
        self, messages: Sequence[Message], content: str, limit: int
    ) -> tuple[list[int], str]:
        """The first `limit` tokens of a known answer to `messages`, and its text up to there."""
        if not (shown := content.strip()):
            return [], content
        reply: Message = {"role": "assistant", "content": content}
        before = self._rendered(messages, reply=True)
        whole = self._rendered([*messages, reply], reply=False)
        behind = whole.removeprefix(before)
        # What the template writes between its prompt and the answer; nothing if it rewrites them.
        lead, found, _ = behind.partition(shown) if whole.startswith(before) else ("", "", "")
        text = lead + shown if found else content
        ids = self._encoded(text)
        if len(ids) > limit:
            ids = ids[:limit]
            content = str(self._tokenizer.decode(ids)).removeprefix(lead if found else "")
        return self._within(ids), content

    def _rendered(self, messages: Sequence[Message], *, reply: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=reply,
            )
        except Exception as error:  # whatever a template raises
            raise WorkloadError(f"the chat template refuses these messages: {error}") from error
        return text

    def _read(self, text: str) -> list[int]:
        return self._within(self._encoded(text))

    def _encoded(self, text: str) -> list[int]:
        """Special tokens are the template's own."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _within(self, ids: list[int]) -> list[int]:
        return ids if self._vocabulary is None else [i % self._vocabulary for i in ids]


def require_tokenizer(tokenizer: Any | None, source: str) -> None:
    """Raises CheckpointError for a model that cannot be talked to."""
    if tokenizer is None:
        raise CheckpointError(
            f"{source}: no tokenizer there, so its answers have no text; take model=demo, or a "
            "folder with a tokenizer"
        )
