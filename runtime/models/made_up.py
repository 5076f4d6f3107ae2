"""Models of a real shape and made-up weights: no files, right for speed, meaningless as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from transformers import AutoConfig

from residency.policies.base import Conflict
from residency.runtime.architecture import Architecture
from residency.runtime.models.base import Model
from residency.runtime.route_tables import MODEL
from residency.runtime.weights import MadeUpWeights, Weights


class MadeUp(Model):
    """Says a model's type and sizes, as its config.json would."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Model.Config):
        """layers: the first so many of the model's layers; 0 takes all.
        seed: of the weights, and of routes that are made up.
        """

        layers: int = 0
        seed: int = 0

    model_type: ClassVar[str]
    sizes: ClassVar[Mapping[str, Any]]  # keys of transformers' config class
    config: Config

    @property
    def num_layers(self) -> int:
        layers: int = self.sizes["num_hidden_layers"]
        return self.config.layers or layers

    @property
    def table_rows(self) -> int:
        """Rows that host tables are cut to; 0 keeps all."""
        return 0

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def architecture(self) -> Architecture:
        sizes = {**self.sizes, "num_hidden_layers": self.num_layers}
        config = AutoConfig.for_model(self.model_type, **sizes)
        source = f"model={self.name}"
        return Architecture.from_config(config, self.config.dtype, source, self.table_rows)

    def weights(self) -> Weights:
        return MadeUpWeights(self.architecture, self.config.seed)

    def notes(self) -> list[str]:
        all_layers = self.sizes["num_hidden_layers"]
        made_up = f"weights: made up ({self.num_layers} of {all_layers} layers)"
        return [made_up, *(super().notes() or [f"routing: {MODEL} (routers are made up too)"])]

    def faults(self) -> Iterator[Conflict]:
        if not 0 <= self.config.layers <= self.sizes["num_hidden_layers"]:
            reason = f"the model has {self.sizes['num_hidden_layers']} layers (0: all)"
            yield Conflict((f"model.layers={self.config.layers}",), reason, "model.layers=0")
            return
        if not 0 <= self.config.seed < 1 << 63:
            key, reason = f"model.seed={self.config.seed}", "it must be from 0 to 2^63 - 1"
            yield Conflict((key,), reason, "model.seed=0")
        yield from super().faults()
