"""The model interface: a config option that resolves to a checkpoint folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from residency.policies.base import Conflict, Part
from residency.policies.errors import CheckpointError, ConfigError
from residency.runtime.architecture import Architecture
from residency.runtime.weights import CheckpointWeights, Weights


class Model(Part, ABC):
    """A Hugging Face folder of safetensors, and how to read it."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """dtype: auto (the checkpoint's own), bfloat16, float16 or float32.
        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        """

        dtype: str = "auto"
        context: int = 0

    group: ClassVar[str] = "model"
    config: Config

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder with config.json, tokenizer and weights."""

    @cached_property
    def architecture(self) -> Architecture:
        """Read from the config alone. Raises CheckpointError or ConfigError."""
        return Architecture.of(self.folder, self.config.dtype)

    def weights(self) -> Weights:
        """The supplier of the weights. Raises CheckpointError for a damaged checkpoint."""
        return CheckpointWeights(self.architecture)

    @property
    def context(self) -> int:
        return self.config.context or self.architecture.max_context

    def faults(self) -> Iterator[Conflict]:
        try:
            limit = self.architecture.max_context
        except CheckpointError as error:
            yield Conflict((f"model={self.name}",), str(error), "model=demo")
            return
        except ConfigError as error:
            key, _, reason = str(error).partition(": ")
            yield Conflict((key,), reason, "model.dtype=auto")
            return
        if not 0 <= self.config.context <= limit:
            reason = f"the model takes contexts of 1 to {limit} tokens (0: its limit)"
            yield Conflict((f"model.context={self.config.context}",), reason, "model.context=0")
