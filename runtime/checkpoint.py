"""A Hugging Face folder of safetensors: which file holds which tensor, read without copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from residency.policies.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """One tensor of the checkpoint, as its file's header describes it."""

    key: str
    file: Path
    shape: tuple[int, ...]


class Checkpoint:
    """The headers of all shards, checked: every file is whole and every indexed tensor is there."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError naming the file, and the tensor where there is one."""
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        for file in self._shards():
            with opened(file) as shard:
                for key in shard.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    self._add(Entry(key, file, tuple(shard.get_slice(key).get_shape())))
        self._check_index()

    def _shards(self) -> list[Path]:
        self._index: dict[str, str] = {}
        if (self.folder / INDEX_NAME).is_file():
            self._index = _read_index(self.folder / INDEX_NAME)
            return [self.folder / name for name in sorted(set(self._index.values()))]
        if (self.folder / SINGLE_NAME).is_file():
            return [self.folder / SINGLE_NAME]
        raise CheckpointError(
            f"{self.folder}: neither {SINGLE_NAME} nor {INDEX_NAME} there; only safetensors "
            "checkpoints are read (convert others with transformers' save_pretrained)"
        )

    def _add(self, entry: Entry) -> None:
        if (other := self.entries.get(entry.key)) is not None:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.key} is there a second time, after {other.file.name}"
            )
        self.entries[entry.key] = entry

    def _check_index(self) -> None:
        for key, name in self._index.items():
            if key not in self.entries:
                raise CheckpointError(
                    f"{self.folder / name}: tensor {key} is missing, though {INDEX_NAME} says it "
                    "is there; fetch the file again"
                )


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open shard. Raises CheckpointError when it is missing, cut short or not safetensors."""
    if not file.is_file():
        raise CheckpointError(f"{file}: this shard is missing; fetch it again")
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            yield shard
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged or cut short ({error}); fetch it again") from error


def tensor_of(entry: Entry) -> torch.Tensor:
    with opened(entry.file) as shard:
        tensor: torch.Tensor = shard.get_tensor(entry.key)
        return tensor


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(file.read_text())["weight_map"])
        names = {str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not a safetensors index ({error!r})") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{file}: shard name {name!r} leads out of the folder")
    return {key: str(name) for key, name in weight_map.items()}
