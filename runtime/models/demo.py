"""demo: the small trained Mixture-of-Experts model that comes with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from residency.runtime.models.checkpoint import CheckpointModel


class Demo(CheckpointModel):
    """8 MoE layers x 32 experts, top-4; the card beside its weights says what it learned."""

    @property
    def folder(self) -> Path:
        return Path(str(importlib.resources.files("residency.demo") / "model"))
