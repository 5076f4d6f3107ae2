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
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise OutputError(
                f"--out {path}: cannot be written ({error.strerror}); choose another folder"
            ) from error
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
        """Write all files, `others` by name. The result comes last: a folder with it is whole."""
        try:
            (self.path / RESULT_NAME).unlink(missing_ok=True)
            _replace(self.path / CONFIG_NAME, config_yaml.encode())
            for name, content in others.items():
                _replace(self.path / name, content)
            _replace(self.path / RESULT_NAME, json.dumps(result, indent=1).encode() + b"\n")
        except OSError as error:
            raise OutputError(f"--out {self.path}: writing failed ({error.strerror})") from error


def _replace(file: Path, content: bytes) -> None:
    """Write beside the file and rename: readers see the old file or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
