"""Expert sources: which checkpoint tensor fills which bytes of which experts' rows.

All of it is known, and checked, from the headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture
from residency.runtime.checkpoint import Checkpoint, Entry
from residency.runtime.formats import OUTER, ExpertFormat
from residency.runtime.layout import Part, part_name

EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Kind:
    """What tensors have in common whose keys differ in the expert's number alone.

    suffix: which of its matrix's stored tensors it is (`runtime/formats`).
    index, count: its place among the sources that the part is joined from.
    stacked: it holds all experts of the layer, one after another.
    """

    layer: int
    part: Part
    suffix: str
    index: int
    count: int
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """What it fills of one expert's part."""
        return (self.part.shape[0] // self.count, *self.part.shape[1:])


class Source(NamedTuple):
    """A checkpoint tensor and the bytes it fills.

    expert: whose it is, or None for a stacked one. offset, num_bytes: within each row.
    stored: what makes the tensor what the row holds, or None where the bytes are the same.
    """

    entry: Entry
    kind: Kind
    expert: int | None
    offset: int
    num_bytes: int
    stored: Callable[[torch.Tensor], torch.Tensor] | None


def plain_key(expert_format: ExpertFormat, key: str) -> tuple[str, str] | None:
    """The key that the plain weight would have, and the suffix; None for what nobody needs."""
    if (found := expert_format.source(key)) is not None:
        return found
    return None if expert_format.ignores(key) else (key, "")


class ExpertSources:
    """Every source of every expert of a checkpoint."""

    def __init__(self, architecture: Architecture, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError naming file and key of a tensor that is missing, there twice,
        of another shape or dtype, or of an expert that the config does not have.
        """
        self._architecture = architecture
        self._checkpoint = checkpoint
        self._format = architecture.format
        self._layers = {name: i for i, name in enumerate(architecture.expert_modules)}
        self._parts = {part.name: part for part in architecture.layout.parts}
        self._kinds: dict[str, Kind | None] = {}  # by key, the expert's number struck out
        self._forms: dict[tuple[object, ...], Callable[..., torch.Tensor] | None] = {}
        self._filled: dict[tuple[int, str, int | None, int], Entry] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self.sources = list(self._found())
        self._require_complete()

    def keys(self) -> set[str]:
        """The checkpoint's keys that are experts'."""
        return {source.entry.key for source in self.sources}

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(source.entry.num_bytes for source in self.sources)

    def _found(self) -> Iterator[Source]:
        for entry in self._checkpoint.entries.values():
            number = EXPERT_NUMBER.search(entry.key)
            key, expert = entry.key, None
            if number is not None:
                key = f"{key[: number.start()]}0{key[number.end() :]}"
                expert = int(number[0])
            if key not in self._kinds:
                self._kinds[key] = self._kind(entry, key, stacked=number is None)
            if (kind := self._kinds[key]) is not None:
                yield self._source(entry, kind, expert)

    def _kind(self, entry: Entry, key: str, *, stacked: bool) -> Kind | None:
        """None for tensors that are not experts'. Raises CheckpointError for an impossible one."""
        if (plain := plain_key(self._format, key)) is None:
            return None
        target, suffix = self._architecture.names.locate(plain[0]), plain[1]
        module, _, parameter = target.name.rpartition(".")
        if module not in self._layers or parameter not in self._architecture.expert_shapes:
            return None
        if target.obstacle:
            raise CheckpointError(
                f"{entry}: its way into {target.name} needs {target.obstacle}, which is not "
                "supported for experts"
            )
        part = self._parts.get(part_name(parameter, suffix))
        if part is None:
            raise CheckpointError(f"{entry} has no place in experts of {self._format.name}")
        layer = self._layers[module]
        self._counts[layer, part.name] = target.count
        return Kind(layer, part, suffix, target.index, target.count, stacked)

    def _source(self, entry: Entry, kind: Kind, expert: int | None) -> Source:
        num_experts = self._architecture.space.num_experts
        if expert is not None and expert >= num_experts:
            raise CheckpointError(f"{entry} is of an expert above the config's {num_experts}")
        place = (kind.layer, kind.part.name, expert, kind.index)
        if (other := self._filled.get(place)) is not None:
            raise CheckpointError(f"{entry} fills the same place as {other}")
        self._filled[place] = entry
        num_bytes = kind.part.num_bytes // kind.count
        offset = kind.part.offset + kind.index * num_bytes
        return Source(entry, kind, expert, offset, num_bytes, self._form(entry, kind))

    def _form(self, entry: Entry, kind: Kind) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """How the entry becomes what is stored; asked once. Raises CheckpointError."""
        alike = (kind.part.name, entry.shape, entry.dtype_name, kind.count, kind.stacked)
        if alike not in self._forms:
            experts = (self._architecture.space.num_experts,) if kind.stacked else ()
            shape, dtype = (*experts, *kind.shape), kind.part.dtype
            self._forms[alike] = stored_form(self._format, entry, kind.suffix, shape, dtype)
        return self._forms[alike]

    def _require_complete(self) -> None:
        """Every part of every expert, exactly once: stacked, or expert by expert."""
        experts = range(self._architecture.space.num_experts)
        for layer in range(len(self._layers)):
            for name in self._parts:
                for index in range(self._counts.get((layer, name), 1)):
                    stacked = (layer, name, None, index) in self._filled
                    for expert in experts:
                        one = (layer, name, expert, index)
                        if stacked and one in self._filled:
                            whole = self._filled[layer, name, None, index]
                            raise CheckpointError(
                                f"{self._filled[one]} fills the same place as {whole}"
                            )
                        if not stacked and one not in self._filled:
                            raise self._missing(*one)

    def _missing(self, layer: int, name: str, expert: int, index: int) -> CheckpointError:
        """Names the key, as the same part of another expert is spelt."""
        module = self._architecture.expert_modules[layer]
        what = f"{name} of expert {expert} of {module}"
        for (other, part, number, place), entry in self._filled.items():
            if (other, part, place) == (layer, name, index) and number is not None:
                key = EXPERT_NUMBER.sub(str(expert), entry.key)
                what = f"tensor {key} ({what})"
                break
        return CheckpointError(f"{self._checkpoint.folder}: the checkpoint lacks {what}")


def stored_form(
    expert_format: ExpertFormat,
    entry: Entry,
    suffix: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What turns the entry's tensor into `shape` and `dtype`; None where its bytes are right.

    Judged by a tensor without memory. One outer scale may stand for both halves of a matrix.
    Raises CheckpointError naming file, key and what differs.
    """
    given = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    try:
        made = expert_format.convert(suffix, given)
    except (RuntimeError, ValueError, TypeError, IndexError):
        made = given
    broadcast = suffix == OUTER and made.shape[-1:] == (1,) and made.shape[:-1] == shape[:-1]
    if made.shape != shape and not broadcast:
        raise CheckpointError(
            f"{entry} has shape {list(entry.shape)} ({entry.dtype_name}), but the config "
            f"makes it {list(shape)}"
            + ("" if made is given else f", stored as {expert_format.name}")
        )
    floats = made.dtype.is_floating_point and made.dtype.itemsize > 1
    if made.dtype != dtype and not (floats and dtype.is_floating_point and dtype.itemsize > 1):
        raise CheckpointError(
            f"{entry} has dtype {entry.dtype_name}, but {expert_format.name} experts are stored "
            f"as {str(dtype).removeprefix('torch.')}"
        )
    viewed = made.untyped_storage()._cdata == given.untyped_storage()._cdata
    if viewed and made.is_contiguous() and made.dtype == dtype and made.shape == shape:
        return None
    return lambda tensor: expert_format.convert(suffix, tensor)
