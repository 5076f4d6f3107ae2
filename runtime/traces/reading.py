"""Reading a trace, in the format of its own or in numpy's."""

from __future__ import annotations

from pathlib import Path

from residency.policies.errors import ConfigError
from residency.runtime.traces.archive import read_archive
from residency.runtime.traces.file import read_mapped
from residency.runtime.traces.trace import Trace

ZIP = b"PK"
NUMPY = b"\x93NUMPY"


def read(file: str | Path, key: str = "trace=") -> Trace:
    """The trace in `file`, its content checked; a trace file is mapped, an archive is loaded.

    key: what the user wrote before the file's name. Raises ConfigError for a file that is missing
    or broken.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}{file}: there is no such file")
    try:
        return read_archive(path) if is_numpy(path) else read_mapped(path)
    except ConfigError as error:
        raise ConfigError(f"{key}{file}: {error}") from error


def is_numpy(path: Path) -> bool:
    """Whether the file is an .npz, an .npy, or named like one."""
    try:
        with path.open("rb") as stream:
            start = stream.read(len(NUMPY))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from error
    return start.startswith((ZIP, NUMPY)) or path.suffix in (".npz", ".npy")
