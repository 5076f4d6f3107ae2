"""Locks on files that end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from residency.policies.errors import OutputError

PATIENCE_S = 1.0  # for a reader that only looked whether the lock is held


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Inside, this process alone has `file`; waits for it. It may be removed inside."""
    descriptor = _locked(file)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held_at_once(file: Path, refusal: str) -> Iterator[None]:
    """As `held`, but raises OutputError with `refusal` when another has it."""
    descriptor = _open(file)
    try:
        if not _taken(descriptor, PATIENCE_S):
            raise OutputError(refusal)
        yield
    finally:
        os.close(descriptor)


def take(file: Path) -> bool:
    """Take `file` for as long as this process lives, if nobody has it."""
    descriptor = _open(file)
    if _taken(descriptor, 0):
        return True
    os.close(descriptor)
    return False


def is_held(file: Path) -> bool:
    """Whether any process has `file`."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _locked(file: Path) -> int:
    while True:
        descriptor = _open(file)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # the one before removed it; whoever comes next makes it anew


def _taken(descriptor: int, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)


def _open(file: Path) -> int:
    """Open, or made for all users; first without making, which shared folders refuse to others."""
    try:
        return os.open(file, os.O_RDWR)
    except FileNotFoundError:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        if os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, 0o666)
        return descriptor
