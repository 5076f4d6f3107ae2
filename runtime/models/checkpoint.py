"""Models that are read from a checkpoint folder."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from residency.policies.base import Capability
from residency.runtime.architecture import Architecture
from residency.runtime.models.base import Model
from residency.runtime.weights import CheckpointWeights, Weights


class CheckpointModel(Model):
    """A Hugging Face folder of safetensors, and how to read it."""

    provides: ClassVar[frozenset[str]] = frozenset({Capability.READS_TEXT})

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder with config.json, tokenizer and weights."""

    @cached_property
    def architecture(self) -> Architecture:
        return Architecture.of(self.folder, self.config.dtype)

    def weights(self) -> Weights:
        return CheckpointWeights(self.architecture, self.folder)
