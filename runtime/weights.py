"""Where weights come from: a checkpoint folder, or made up in place for a shape alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture
from residency.runtime.banks import Banks
from residency.runtime.checkpoint import Checkpoint
from residency.runtime.dense_weights import DenseWeights, without_experts
from residency.runtime.expert_sources import ExpertSources
from residency.runtime.formats import Plain
from residency.runtime.host_tables import (
    HostTable,
    in_memory,
    mapped_part,
    ordered_parts,
    without_tables,
)
from residency.runtime.layout import ALIGNMENT
from residency.runtime.loading import Progress, load_banks

BLOCK_ELEMENTS = 1 << 24
SHIFT = 37 * 4096 + 64  # bytes from the place of one row's numbers to the next row's
QUANTISED_SHAPE = (1024, 4096)  # of the matrix that blocks of stored parts come from
SCALE = 0.02
NUM_THREADS = 16


class Weights(Protocol):
    """Supplies a model without experts and host tables, those in banks and apart, and a tokenizer
    if there is one.
    """

    made_up: ClassVar[bool]  # whether no training stands behind them

    @property
    def dequantised_bytes(self) -> int:
        """Of the model's other weights, those that are stored quantised: bytes on the device."""

    def notes(self) -> list[str]:
        """Lines for a report, once the model is loaded."""

    def tokenizer(self) -> Any: ...

    def model(self, device: torch.device) -> PreTrainedModel: ...

    def banks(self, device: torch.device, progress: Progress | None) -> Banks: ...

    def tables(self, mapped: bool, progress: Progress | None) -> list[HostTable]:
        """mapped: leave them in the checkpoint's files instead of reading them into memory."""
        ...


class CheckpointWeights:
    """Weights of a folder of safetensors."""

    made_up: ClassVar[bool] = False

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        """Reads headers alone. Raises CheckpointError for a folder whose files are damaged or
        missing, or whose tensors are not those of the config.
        """
        self.architecture = architecture
        self.checkpoint = Checkpoint(folder)
        self._experts = ExpertSources(architecture, self.checkpoint)
        self._dense = DenseWeights(architecture, self.checkpoint, self._experts)

    @property
    def dequantised_bytes(self) -> int:
        return self._dense.dequantised_bytes

    def notes(self) -> list[str]:
        if not (unneeded := self._dense.unneeded):
            return []
        return [f"checkpoint: {len(unneeded)} tensors are not the model's, e.g. {unneeded[0]}"]

    def tokenizer(self) -> Any:
        """The folder's tokenizer, or None where there is none and prompts must be token ids."""
        folder = self.checkpoint.folder
        if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
            return None
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{folder}: the tokenizer cannot be read: {reason}") from error

    def model(self, device: torch.device) -> PreTrainedModel:
        return self._dense.load(device)

    def banks(self, device: torch.device, progress: Progress | None) -> Banks:
        return load_banks(self.architecture, self._experts, progress)

    def tables(self, mapped: bool, progress: Progress | None) -> list[HostTable]:
        """Raises CheckpointError for a table that is missing or misshapen."""
        located: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, entry in self.checkpoint.entries.items() if self.architecture.tables else ():
            name = self.architecture.names.locate(key).name
            located.setdefault(name, {})[key] = entry.shape
        dtype, made = self.architecture.dtype, []
        for shape in self.architecture.tables:
            parts = located.get(f"{shape.name}.weight", {})
            keys = ordered_parts(shape, parts, self.checkpoint.folder)
            pieces = [mapped_part(self.checkpoint.entries[key]) for key in keys]
            if not mapped:
                pieces = [_copied(pieces, in_memory(shape, dtype), progress)]
            made.append(HostTable(shape, pieces, dtype))
        return made


class MadeUpWeights:
    """Normal random weights for a real shape: right for speed, meaningless as text.

    Experts repeat blocks of random numbers drawn on the device, each row from another place.
    """

    made_up: ClassVar[bool] = True

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self.architecture = architecture
        self.seed = seed

    @property
    def dequantised_bytes(self) -> int:
        return 0

    def notes(self) -> list[str]:
        return []

    def tokenizer(self) -> None:
        return None

    def model(self, device: torch.device) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        architecture = self.architecture
        bare = without_experts(architecture.expert_classes)
        with bare, without_tables(architecture.tables), device:
            model = AutoModelForCausalLM.from_config(architecture.config, dtype=architecture.dtype)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, SCALE)
        made: PreTrainedModel = model.eval().requires_grad_(False)
        return made

    def banks(self, device: torch.device, progress: Progress | None) -> Banks:
        banks = Banks(self.architecture.space, self.architecture.layout)
        blocks = self._part_blocks(device)
        rows = [row for layer in banks.layers for row in layer.numpy()]

        def fill(number: int) -> int:
            row = rows[number]
            for part in banks.layout.parts:
                block, begin, end = blocks[part.name], part.offset, part.offset + part.num_bytes
                _fill(row[begin:end], block, (number * SHIFT + begin) % len(block))
                row[end : end + -end % ALIGNMENT] = 0
            return len(row)

        done = 0
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for size in pool.map(fill, range(len(rows))):
                done += size
                if progress is not None:
                    progress("experts (made up)", done, banks.num_bytes)
        return banks

    def tables(self, mapped: bool, progress: Progress | None) -> list[HostTable]:
        """Always in memory: there are no files."""
        block = self._block(torch.device("cpu"))
        made, dtype = [], self.architecture.dtype
        for shape in self.architecture.tables:
            rows = in_memory(shape, dtype)
            _fill(rows.view(torch.uint8).flatten().numpy(), block, 0)
            made.append(HostTable(shape, [rows], dtype))
        return made

    def _part_blocks(self, device: torch.device) -> dict[str, np.ndarray]:
        """uint8 blocks by the name of the part that they fill.

        Codes and scales come from one matrix of random weights, and not from the same place of it.
        """
        layout, block = self.architecture.layout, self._block(device)
        blocks = {part.name: block for part in layout.parts}
        if isinstance(layout.format, Plain):
            return blocks
        generator = torch.Generator(device).manual_seed(self.seed)
        matrix = torch.randn(QUANTISED_SHAPE, generator=generator, device=device) * SCALE
        matrices = [n for n, shape in self.architecture.expert_shapes.items() if len(shape) == 2]
        for suffix, stored in layout.format.quantise(matrix).items():
            as_bytes = stored.cpu().flatten().view(torch.uint8).numpy()
            for name in matrices:
                blocks[layout.suffixes(name)[suffix]] = as_bytes
        return blocks

    def _block(self, device: torch.device) -> np.ndarray:
        """uint8 block of random weights in the model's dtype."""
        generator = torch.Generator(device).manual_seed(self.seed)
        shape = (BLOCK_ELEMENTS,)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (values * SCALE).to(self.architecture.dtype).cpu().view(torch.uint8).numpy()


def _copied(
    pieces: list[torch.Tensor], rows: torch.Tensor, progress: Progress | None
) -> torch.Tensor:
    done = 0
    for piece in pieces:
        rows[done : done + len(piece)].copy_(piece)
        done += len(piece)
        if progress is not None:
            progress("host tables", done * rows[0].nbytes, rows.nbytes)
    return rows


def _fill(row: np.ndarray, block: np.ndarray, place: int) -> int:
    """Fill a row from the block, from `place` on. numpy copies on the calling thread alone."""
    filled = 0
    while filled < len(row):
        part = block[place : place + len(row) - filled]
        row[filled : filled + len(part)] = part
        filled, place = filled + len(part), 0
    return filled
