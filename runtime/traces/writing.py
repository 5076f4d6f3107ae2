"""Writing a trace, in the format that its file's name asks for."""

from __future__ import annotations

from pathlib import Path

from residency.runtime.traces.archive import write_archive
from residency.runtime.traces.file import write_mapped
from residency.runtime.traces.trace import Trace


def save(trace: Trace, file: Path, option: str) -> None:
    """Whole or not at all: an .npz by that name, else a trace file that can be mapped.

    Raises OutputError, which begins with `option`.
    """
    form = write_archive if file.suffix == ".npz" else write_mapped
    form(trace, file, option)
