"""Where weights come from: a checkpoint folder, or made up in place for a shape alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from residency.runtime.architecture import Architecture
from residency.runtime.banks import Banks
from residency.runtime.checkpoint import Checkpoint
from residency.runtime.loading import (
    Progress,
    load_banks,
    load_model,
    without_experts,
)

BLOCK_ELEMENTS = 1 << 24
SCALE = 0.02
NUM_THREADS = 16


class Weights(Protocol):
    """Supplies a model without experts, and the experts in banks."""

    def model(self, device: torch.device) -> PreTrainedModel: ...

    def banks(self, device: torch.device, progress: Progress | None) -> Banks: ...


class CheckpointWeights:
    """Weights of a folder of safetensors."""

    def __init__(self, architecture: Architecture) -> None:
        """Raises CheckpointError for a folder whose files are damaged or missing."""
        self.architecture = architecture
        self.checkpoint = Checkpoint(architecture.folder)

    def model(self, device: torch.device) -> PreTrainedModel:
        return load_model(self.architecture, self.checkpoint, device)

    def banks(self, device: torch.device, progress: Progress | None) -> Banks:
        return load_banks(self.architecture, self.checkpoint, progress)


class MadeUpWeights:
    """Normal random weights for a real shape: right for speed, meaningless as text.

    Experts repeat blocks of random numbers drawn on the device, each row from another place.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self.architecture = architecture
        self.seed = seed

    def model(self, device: torch.device) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        classes = self.architecture.expert_classes
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.architecture.dtype)
        try:
            with without_experts(classes), device:
                model = AutoModelForCausalLM.from_config(self.architecture.config)
        finally:
            torch.set_default_dtype(default)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, SCALE)
        made: PreTrainedModel = model.eval().requires_grad_(False)
        return made

    def banks(self, device: torch.device, progress: Progress | None) -> Banks:
        banks = Banks(self.architecture.space, self.architecture.layout)
        block = self._block(device)
        pieces = [(layer, row) for layer in banks.layers for row in range(len(layer))]
        done = 0
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for size in pool.map(lambda piece: _fill(piece[0][piece[1]], block, piece[1]), pieces):
                done += size
                if progress is not None:
                    progress("experts (made up)", done, banks.num_bytes)
        return banks

    def _block(self, device: torch.device) -> torch.Tensor:
        """uint8 block of random weights in the model's dtype."""
        generator = torch.Generator(device).manual_seed(self.seed)
        shape = (BLOCK_ELEMENTS,)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (values * SCALE).to(self.architecture.dtype).cpu().view(torch.uint8)


def _fill(row: torch.Tensor, block: torch.Tensor, number: int) -> int:
    """Fill a row from the block, starting at a place of its own."""
    shift = number * 4096 % len(block)
    filled = 0
    while filled < len(row):
        part = block[shift : shift + len(row) - filled]
        row[filled : filled + len(part)].copy_(part)
        filled, shift = filled + len(part), 0
    return filled
