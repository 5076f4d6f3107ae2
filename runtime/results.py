"""Result folders: `result.json` and the composed config, whole or not at all.

Files are written beside their place and then renamed into it, all at once for an interrupt. What
lies in that place, a symbolic link too, is replaced and never written through.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from residency.policies.errors import OutputError
from residency.runtime.claims import PARTIAL, Claim, lock, remove_partial
from residency.runtime.interrupts import held_back

RESULT_NAME = "result.json"
CONFIG_NAME = "config.yaml"


class ResultFolder:
    """Where one measuring command writes. Checked before the work starts, and claimed until the
    result is written.
    """

    def __init__(self, path: Path, force: bool = False) -> None:
        """Creates the folder. Raises OutputError when it cannot be written, holds a result or is
        another process's just now.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._claim = Claim(path, "--out")
        except OSError as error:
            raise OutputError(
                f"--out {path}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        require_writable(path / RESULT_NAME, "--out")
        if (path / RESULT_NAME).exists() and not force:
            raise OutputError(
                f"--out {path}: there is a {RESULT_NAME} already; choose another folder or add "
                "--force"
            )

    def write(
        self,
        result: dict[str, Any],
        config_yaml: str,
        others: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Write all files, `others` by name. The result comes last: a folder with it is whole.

        A result that was there stays until the new files are all on disk.
        """
        content = {CONFIG_NAME: config_yaml.encode(), **others}
        content[RESULT_NAME] = json.dumps(result, indent=1).encode() + b"\n"
        write_whole({inside(self.path, name): data for name, data in content.items()}, "--out")
        self._claim.release()


def inside(folder: Path, name: str) -> Path:
    """The file of that name. Raises OutputError for a name that is not one file's in the folder."""
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise OutputError(f"--out {folder}: {name!r} does not name a file in it")
    return folder / name


def require_writable(file: Path, option: str) -> None:
    """Raises OutputError now if `file` could not be written later."""
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"{option} {file.parent}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    if file.is_dir():
        raise OutputError(f"{option} {file}: is a folder; name a file")


def write_whole(files: Mapping[Path, bytes], option: str) -> None:
    """Write beside each file, then rename all: readers see old files or new ones, never a part.

    Raises OutputError, and leaves the old files, when the disk does not take the new ones.
    """
    for folder in {file.parent for file in files}:
        remove_partial(folder)
    try:
        with ExitStack() as stack:
            staged = [(stack.enter_context(_staged(*one)), one[0]) for one in files.items()]
            with held_back():
                for temporary, file in staged:
                    os.replace(temporary, file)
    except OSError as error:
        folder = next(iter(files)).parent
        raise OutputError(f"{option} {folder}: writing failed ({error.strerror})") from error


@contextmanager
def _staged(file: Path, content: bytes) -> Iterator[Path]:
    """A temporary file beside `file` with the content, on disk, readable as new files are. It is
    locked while it may be there, and gone afterwards.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            with suppress(OSError):  # no locks here
                lock(descriptor)
            os.fchmod(descriptor, 0o666 & ~_umask())
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
