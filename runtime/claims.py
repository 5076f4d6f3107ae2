"""Claims: a folder that one process at a time writes into, and files that nobody writes any more.

Locks are the system's, on the folder and on the files themselves: nothing shows them, and they end
with the process, however that ends. A file system without locks gives every claim.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from residency.policies.errors import OutputError

PARTIAL = ".partial"  # behind the names of files that are being written


class Claim:
    """A folder of one's own until `release`, or until the claim is forgotten."""

    def __init__(self, folder: Path, option: str) -> None:
        """Raises OutputError, which begins with `option`, where another process has it."""
        descriptor = os.open(folder, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            lock(descriptor)
        except BlockingIOError as error:
            self.release()
            raise OutputError(
                f"{option} {folder}: another run is writing there now; wait until it has ended, or "
                "choose another folder"
            ) from error
        except OSError:  # no locks here
            pass


def lock(descriptor: int) -> None:
    """Raises BlockingIOError where another has it, any other OSError where there are no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_partial(folder: Path) -> None:
    """Remove what writers left that were killed: partial files that nobody has locked."""
    for file in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError):  # it is being written, or gone by now
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                lock(descriptor)
                file.unlink()
            finally:
                os.close(descriptor)
