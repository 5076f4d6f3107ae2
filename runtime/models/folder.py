"""folder: a checkpoint on disk, as transformers' save_pretrained or a hub download leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from residency.runtime.models.checkpoint import CheckpointModel


class Folder(CheckpointModel):
    """Any Mixture-of-Experts model of transformers that stores safetensors."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(CheckpointModel.Config):
        """path: the folder; relative paths start where the command is run."""

        path: str = MISSING

    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.path).expanduser().resolve()
