"""JSON read with its place: whatever is wrong in a file is named by its pointer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from residency.policies.errors import ConfigError


class Node:
    """A value within a JSON file. pointer: where it is, as RFC 6901 writes it."""

    def __init__(self, value: Any, file: Path, pointer: str = "") -> None:
        self.value = value
        self.file = file
        self.pointer = pointer

    @classmethod
    def read(cls, file: Path) -> Node:
        """The object in `file`. Raises ConfigError for a file that holds none."""
        try:
            value = json.loads(file.read_bytes(), parse_constant=_refuse)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:  # the first is also undecodable bytes
            raise ConfigError(f"{file}: damaged, not JSON ({error})") from error
        node = cls(value, file)
        if not isinstance(value, dict):
            node.refuse("an object")
        return node

    def refuse(self, wanted: str) -> NoReturn:
        """Raises ConfigError: this value is not what was wanted."""
        shown = json.dumps(self.value)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise ConfigError(f"{self.file}: {self.pointer or 'the whole'} is {shown}, not {wanted}")

    def at(self, *names: str) -> Node:
        """The value below, which must be there."""
        found = self
        for name in names:
            below = found.get(name)
            if below is None:
                raise ConfigError(f"{self.file}: {found._below(name)} is missing")
            found = below
        return found

    def get(self, name: str) -> Node | None:
        """The value below; None where it is absent or null."""
        value = self.mapping().get(name)
        return None if value is None else Node(value, self.file, self._below(name))

    def _below(self, name: str) -> str:
        return f"{self.pointer}/{name.replace('~', '~0').replace('/', '~1')}"

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def items(self) -> list[tuple[str, Node]]:
        """Everything below an object, by name; nulls are left out."""
        pairs = ((name, self.get(name)) for name in self.mapping())
        return [(name, node) for name, node in pairs if node is not None]

    def rows(self) -> list[Node]:
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [Node(v, self.file, f"{self.pointer}/{i}") for i, v in enumerate(self.value)]

    def number(self, least: float = -math.inf) -> float:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            self.refuse("a number" if least == -math.inf else f"a number of at least {least:g}")
        return float(value)

    def count(self) -> int:
        """A whole number from 0."""
        number = self.number(0)
        if number != int(number):
            self.refuse("a whole number")
        return int(number)

    def seconds(self) -> float:
        """A time above 0."""
        seconds = self.number()
        if seconds <= 0:
            self.refuse("a time above 0")
        return seconds

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse("a text")
        return self.value

    def texts(self) -> list[str]:
        return [node.text() for node in self.rows()]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
