"""demo: the small trained Mixture-of-Experts model that comes with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from residency.runtime.models.base import Model


class Demo(Model):
    """8 MoE layers x 32 experts, top-4; the card beside its weights says what it learned."""

    @property
    def folder(self) -> Path:
        return Path(str(importlib.resources.files("residency.demo") / "model"))
