"""Expert sources: which checkpoint tensor fills which bytes of which experts' rows.

All of it is known, and checked, from the headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture
from residency.runtime.checkpoint import Checkpoint, Entry
from residency.runtime.formats import OUTER, ExpertFormat
from residency.runtime.layout import Part
from residency.runtime.names import EXPERT_NUMBER, Target


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and the bytes it fills.

    suffix: which of its matrix's stored tensors it is (`runtime/formats`).
    expert: whose it is, or None if it holds all experts of the layer, one after another.
    offset, num_bytes: within each row.
    stored: what makes the tensor [*own] what the row holds, or None where the bytes are the same.
    """

    entry: Entry
    layer: int
    part: Part
    suffix: str
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
        self._forms: dict[tuple[object, ...], Callable[..., torch.Tensor] | None] = {}
        self._filled: dict[tuple[int, str, int | None, int], Entry] = {}
        self._counts: dict[str, int] = {}
        self.sources = [
            self._source(entry, suffix, target, layer)
            for entry, suffix, target, layer in self._found()
        ]
        self._require_complete()

    def keys(self) -> set[str]:
        """The checkpoint's keys that are experts'."""
        return {source.entry.key for source in self.sources}

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(source.entry.num_bytes for source in self.sources)

    def _found(self) -> Iterator[tuple[Entry, str, Target, int]]:
        parameters = self._architecture.expert_shapes
        for entry in self._checkpoint.entries.values():
            if (plain := plain_key(self._format, entry.key)) is None:
                continue
            target = self._architecture.names.locate(plain[0])
            module, _, parameter = target.name.rpartition(".")
            if module in self._layers and parameter in parameters:
                yield entry, plain[1], target, self._layers[module]

    def _source(self, entry: Entry, suffix: str, target: Target, layer: int) -> Source:
        num_experts = self._architecture.space.num_experts
        if target.obstacle:
            raise CheckpointError(
                f"{entry}: its way into {target.name} needs {target.obstacle}, which is not "
                "supported for experts"
            )
        if target.expert is not None and target.expert >= num_experts:
            raise CheckpointError(
                f"{entry} is of an expert above the config's {num_experts}"
            )
        name = target.name.rpartition(".")[2] + (f".{suffix}" if suffix else "")
        if (part := self._parts.get(name)) is None:
            raise CheckpointError(f"{entry} has no place in experts of {self._format.name}")
        self._fill(entry, layer, name, target)
        num_bytes = part.num_bytes // target.count
        return Source(
            entry,
            layer,
            part,
            suffix,
            target.expert,
            part.offset + target.index * num_bytes,
            num_bytes,
            self._form(entry, part, suffix, target),
        )

    def _fill(self, entry: Entry, layer: int, name: str, target: Target) -> None:
        place = (layer, name, target.expert, target.index)
        if (other := self._filled.get(place)) is not None:
            raise CheckpointError(f"{entry} fills the same place as {other}")
        self._filled[place] = entry
        self._counts[name] = target.count

    def _form(
        self, entry: Entry, part: Part, suffix: str, target: Target
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """How the entry becomes what is stored; asked once a kind. Raises CheckpointError."""
        stacked = target.expert is None
        kind = (part.name, entry.shape, entry.dtype_name, target.count, stacked)
        if kind not in self._forms:
            shape = (part.shape[0] // target.count, *part.shape[1:])
            if stacked:
                shape = (self._architecture.space.num_experts, *shape)
            self._forms[kind] = stored_form(self._format, entry, suffix, shape, part.dtype)
        return self._forms[kind]

    def _require_complete(self) -> None:
        """Every part of every expert, exactly once: stacked, or expert by expert."""
        experts = range(self._architecture.space.num_experts)
        for layer in range(len(self._layers)):
            for name in self._parts:
                for index in range(self._counts.get(name, 1)):
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
    same = made is given or (made._base is given and made.is_contiguous())
    if same and made.dtype == dtype and made.shape == shape:
        return None
    return lambda tensor: expert_format.convert(suffix, tensor)
