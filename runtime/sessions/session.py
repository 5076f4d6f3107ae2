"""Sessions: recorded conversations, one a line of a JSONL file."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from residency.policies.errors import WorkloadError
from residency.runtime.chat_template import Message

SAMPLE = "sample.jsonl"  # beside this module, with its source and licence
KEY = "workload.path"


@dataclass(frozen=True)
class Exchange:
    """A user's message, and what was answered if that is recorded."""

    user: str
    assistant: str | None


@dataclass(frozen=True)
class Session:
    """system: empty for none."""

    name: str
    system: str
    exchanges: tuple[Exchange, ...]


def read_sessions(path: str) -> list[Session]:
    """The sessions of a file; of the shipped sample for an empty path.

    A line is an object with `messages`, a list of `role` and `content`: an optional system message,
    then user and assistant by turns; and an `id` if it has one. Raises WorkloadError with the line.
    """
    if not path:
        sample = importlib.resources.files("residency.runtime.sessions") / SAMPLE
        return _parsed(sample.read_text(encoding="utf-8"), SAMPLE)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{KEY}={path}: cannot be read ({error})") from error
    return _parsed(text, f"{KEY}={path}")


def _parsed(text: str, where: str) -> list[Session]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise WorkloadError(f"{where}: there is no session in it; one line of JSON is one session")
    return [_session(f"{where}, line {number}", number, line) for number, line in lines]


def _session(where: str, number: int, line: str) -> Session:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not JSON ({error})") from error
    if not (isinstance(value, dict) and isinstance(value.get("messages"), list)):
        raise WorkloadError(f'{where}: it must be an object with a list of "messages"')
    messages = [_message(f"{where}, message {i}", m) for i, m in enumerate(value["messages"], 1)]
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    first = 1 if system else 0
    rest = messages[first:]
    if not rest:
        raise WorkloadError(f"{where}: there is no message of a user in it")
    for i, message in enumerate(rest):
        expected = ("user", "assistant")[i % 2]
        if message["role"] != expected:
            raise WorkloadError(
                f"{where}, message {i + first + 1}: its role is {message['role']} where it must be "
                f"{expected}; behind a system message, if any, user and assistant take turns"
            )
    contents = [message["content"] for message in rest]
    answers: list[str | None] = [*contents[1::2], *([None] if len(rest) % 2 else [])]
    exchanges = tuple(Exchange(*pair) for pair in zip(contents[::2], answers, strict=True))
    return Session(str(value.get("id", f"line {number}")), system, exchanges)


def _message(where: str, value: Any) -> Message:
    known = isinstance(value, dict) and value.get("role") in ("system", "user", "assistant")
    if not known:
        raise WorkloadError(f'{where}: its "role" must be system, user or assistant')
    content = value.get("content")
    if not isinstance(content, str):
        raise WorkloadError(f'{where}: its "content" must be text')
    if not content.strip() and value["role"] != "assistant":
        raise WorkloadError(f'{where}: its "content" is empty')
    return cast(Message, value)
