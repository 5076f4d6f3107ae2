"""Numba where it is installed: loops over flat arrays at the speed of C, without the lock.

Without it the same functions run as plain Python: right, and about a hundred times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except ImportError:  # an extra of the package
    numba = None


def _forget_stale() -> None:
    """Numba looks at a function's own file, not at those of the functions it calls: drop what was
    compiled before any of them changed.
    """
    folder = Path(__file__).parent
    changed = max(file.stat().st_mtime for file in folder.rglob("*.py"))
    with suppress(OSError):
        for index in folder.rglob("*.nbi"):
            if index.stat().st_mtime < changed:
                index.unlink(missing_ok=True)


COMPILES = numba is not None
MEND = "no numba here, so policies are replayed in their tensor form, which is slow; mend it with "
MEND += "pip install 'residency[replay]'"


if COMPILES:
    _forget_stale()


def jit(function: Function) -> Function:
    """The compiled function; what was compiled once is kept beside the module.

    It must create no array: arrays are not counted in there, which would take longer than the
    loops themselves.
    """
    if numba is None:
        return function
    compiled: Function
    try:
        compiled = numba.njit(cache=True, nogil=True, _nrt=False)(function)
    except RuntimeError:  # no folder to keep it in can be written
        compiled = numba.njit(nogil=True, _nrt=False)(function)
    return compiled
