"""A Hugging Face folder of safetensors: which file holds which tensor, and at which bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from residency.policies.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LENGTH_BYTES = 8  # a file begins with its header's length
METADATA = "__metadata__"
# The names of the file format. Others can be named in a message, and are not read.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Entry(NamedTuple):
    """One tensor of the checkpoint, as its file's header describes it.

    dtype_name: as the header spells it. offset, num_bytes: where its bytes are in the file.
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype_name: str
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Raises CheckpointError for a dtype that is not read."""
        if self.dtype_name not in DTYPES:
            raise CheckpointError(f"{self}: dtype {self.dtype_name} is not read")
        return DTYPES[self.dtype_name]

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.key}"


class Checkpoint:
    """The headers of all shards, checked: every file is whole and every indexed tensor is there."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError naming the file, and the tensor where there is one."""
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        for file in self._shards():
            for entry in entries_of(file):
                self._add(entry)
        self._check_index()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

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
            raise CheckpointError(f"{entry} is there a second time, after {other.file.name}")
        self.entries[entry.key] = entry

    def _check_index(self) -> None:
        for key, name in self._index.items():
            if key not in self.entries:
                raise CheckpointError(
                    f"{self.folder / name}: tensor {key} is missing, though {INDEX_NAME} says it "
                    "is there; fetch the file again"
                )


def entries_of(file: Path) -> Iterator[Entry]:
    """The tensors of a shard, from its header.

    The safetensors library judges the header: sizes that fit dtypes and shapes, no holes, no
    overlaps, a file as long as it says. Offsets it does not tell, so those are read here.

    Raises CheckpointError when the file is missing, cut short or not safetensors.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: this shard is missing; fetch it again")
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged or cut short ({error}); fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    start = LENGTH_BYTES + length
    for key, tensor in header.items():
        if key != METADATA:
            begin, end = tensor["data_offsets"]
            shape = tuple(tensor["shape"])
            yield Entry(key, file, shape, tensor["dtype"], start + begin, end - begin)


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(file.read_text())["weight_map"])
        names = {str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors index ({error!r})") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{file}: shard name {name!r} leads out of the folder")
    return {key: str(name) for key, name in weight_map.items()}
