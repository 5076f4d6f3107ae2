"""Host tables: embeddings too large for the device, of which a token reads a few short rows.

They stay on the host, beside the banks: in memory, pinned where a device reads them itself by its
own indices, or mapped from the checkpoint's files, where rows are gathered by the host. The model
is built without their parameters; a `HostTable` stands in the embedding's place.

Legend: N rows of a table, D their width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from residency.policies.errors import CheckpointError
from residency.runtime.checkpoint import Entry
from residency.runtime.host_memory import empty_rows

MODULES = frozenset({"ngram_embedding"})  # names of embeddings that are host tables
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class TableShape:
    """One table as the model's config describes it.

    name: of the module. num_ids: rows that the model's ids may ask for. num_rows: rows that are
    kept, ids being taken modulo them; fewer than num_ids only where weights are made up.
    reads: rows that a token reads. layer: ordinal of the MoE layer beside it.
    """

    name: str
    num_ids: int
    num_rows: int
    width: int
    reads: int
    layer: int

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.width

    @property
    def elements_per_token(self) -> int:
        return self.reads * self.width


def tables_of(
    skeleton: nn.Module, expert_modules: Sequence[str], num_rows: int = 0
) -> tuple[TableShape, ...]:
    """The tables of a model on the meta device. num_rows: cut each to so many; 0 keeps all."""
    found = []
    for name, module in skeleton.named_modules():
        parent, _, last = name.rpartition(".")
        if last not in MODULES or not isinstance(module, nn.Embedding):
            continue
        owner: Any = skeleton.get_submodule(parent)
        ids, width = module.num_embeddings, module.embedding_dim
        layer = _ordinal(name, expert_modules)
        kept = min(ids, num_rows) if num_rows else ids
        found.append(TableShape(name, ids, kept, width, owner.ngram_heads, layer))
    return tuple(found)


def _ordinal(name: str, expert_modules: Sequence[str]) -> int:
    """The MoE layer whose experts have most of the module's name in common with it."""
    path = name.split(".")

    def common(other: str) -> int:
        pairs = zip(path, other.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)

    return max(range(len(expert_modules)), key=lambda i: common(expert_modules[i]))


class HostTable(nn.Module):
    """Stands for an embedding: rows by id, on the device of the ids.

    parts: [n, D] each, which follow one another; one part where a device may read them.
    on_device: whether kernels of the device read the table, which is pinned then.
    """

    def __init__(self, shape: TableShape, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.on_device = False
        self._parts = list(parts)
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    @property
    def weight(self) -> Tensor:
        """What transformers asks for the device of the rows."""
        return self._parts[0]

    @property
    def memory(self) -> Tensor:
        """uint8 view of a table of one part, for pinning."""
        (part,) = self._parts
        return part.view(torch.uint8)

    def forward(self, ids: Tensor) -> Tensor:
        """[.., D] in the model's dtype; ids int64 of any shape."""
        if self.on_device and ids.is_cuda:
            from residency.runtime.kernels.table_rows import launch_table_rows

            return launch_table_rows(self._parts[0], ids.contiguous())
        at = torch.remainder(ids.cpu(), self.shape.num_rows).flatten()
        rows = torch.empty(len(at), self.shape.width, dtype=self.dtype)
        part_of = torch.bucketize(at, self._ends, right=True)
        for number in part_of.unique().tolist():
            mine = part_of == number
            begin = int(self._ends[number]) - len(self._parts[number])
            rows[mine] = self._parts[number][at[mine] - begin].to(self.dtype)
        return rows.view(*ids.shape, -1).to(ids.device)


def in_memory(shape: TableShape, dtype: torch.dtype) -> Tensor:
    """[N, D], not touched yet."""
    return empty_rows(shape.num_rows, shape.width * dtype.itemsize).view(dtype)


def mapped_part(entry: Entry) -> Tensor:
    """A checkpoint's tensor as it lies in its file, read page by page when it is asked for."""
    with safe_open(entry.file, framework="pt", device="cpu") as shard:
        tensor: Tensor = shard.get_tensor(entry.key)
    return tensor


def ordered_parts(
    shape: TableShape, parts: Mapping[str, tuple[int, ...]], where: object
) -> list[str]:
    """The checkpoint's keys of one table, by the number in them. Raises CheckpointError."""
    keys = sorted(parts, key=lambda key: [int(n) for n in _NUMBER.findall(key)])
    rows = sum(parts[key][0] for key in keys)
    if not keys:
        raise CheckpointError(f"{where}: tensor {shape.name}.weight is missing")
    if rows != shape.num_rows or any(parts[key][1:] != (shape.width,) for key in keys):
        raise CheckpointError(
            f"{where}: tensor {keys[0]} and those like it have {rows} rows of "
            f"{list(parts[keys[0]][1:])}, but the config makes it {shape.num_rows} of {shape.width}"
        )
    return keys


def install(model: nn.Module, tables: Iterable[HostTable]) -> None:
    """Put the tables in the places of their embeddings."""
    for table in tables:
        parent, _, last = table.shape.name.rpartition(".")
        setattr(model.get_submodule(parent), last, table)


@contextmanager
def without_tables(shapes: Sequence[TableShape]) -> Iterator[None]:
    """Inside, embeddings of these shapes are built without parameters, as if initialised."""
    embedding: Any = nn.Embedding
    original = embedding.__init__
    extents = {(shape.num_ids, shape.width) for shape in shapes}

    def init(module: Any, num: int, width: int, *args: Any, **kwargs: Any) -> None:
        if (num, width) not in extents:
            original(module, num, width, *args, **kwargs)
            return
        with torch.device("meta"):
            original(module, num, width, *args, **kwargs)
        del module.weight
        module._is_hf_initialized = True

    if extents:
        embedding.__init__ = init
    try:
        yield
    finally:
        embedding.__init__ = original
