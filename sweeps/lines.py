"""One JSON object a line over a socket: how a worker and who started it talk."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


class Closed(Exception):
    """The other end is gone."""


class Silent(Exception):
    """Nothing came in time."""


class Lines:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self._one_at_a_time = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises Closed."""
        try:
            with self._one_at_a_time:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Closed from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises Closed, or Silent after timeout_s."""
        self._socket.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise Silent from error
            except OSError as error:
                raise Closed from error
            if not more:
                raise Closed
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is gone."""
        while True:
            try:
                yield self.receive()
            except Closed:
                return

    def close(self) -> None:
        self._socket.close()
