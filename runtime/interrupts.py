"""Interrupts: ctrl-C and SIGTERM, which end a command alike."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What cleans up behind ctrl-C cleans up behind it too."""


@contextmanager
def termination() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated, unless whoever started the process has it ignored.

    Only the main thread gets signals; in another one nothing changes.
    """
    if not _is_main() or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return

    def terminate(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        _restore(signal.SIGTERM, before)


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, interrupts wait until the end: around what must not be done by half."""
    if not _is_main():
        yield
        return
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda came, _: waiting.append(came)) for number in SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            _restore(number, handler)
        for came in waiting[:1]:
            signal.raise_signal(came)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _restore(number: int, handler: object) -> None:
    """A handler that is not Python's reads as None, and cannot be put back."""
    signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
