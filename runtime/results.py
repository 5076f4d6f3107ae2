"""Result folders: `result.json` and the composed config, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from residency.policies.errors import OutputError

RESULT_NAME = "result.json"
CONFIG_NAME = "config.yaml"


class ResultFolder:
    """Where one measuring command writes. Checked before the work starts."""

    def __init__(self, path: Path, force: bool = False) -> None:
        """Creates the folder. Raises OutputError when it cannot be written or holds a result."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
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
        write_whole({self.path / name: data for name, data in content.items()}, "--out")


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
    staged: dict[Path, Path] = {}
    try:
        for file, content in files.items():
            staged[file] = _stage(file, content)
        for file, temporary in staged.items():
            os.replace(temporary, file)
    except OSError as error:
        folder = next(iter(files)).parent
        raise OutputError(f"{option} {folder}: writing failed ({error.strerror})") from error
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(file: Path, content: bytes) -> Path:
    """A temporary file beside `file` with the content, on disk, readable as new files are."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, 0o666 & ~_umask())
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
