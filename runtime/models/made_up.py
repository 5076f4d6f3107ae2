"""Models of a real shape and made-up weights: no files, right for speed, meaningless as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from transformers import AutoConfig

from residency.policies.base import Conflict
from residency.policies.errors import CheckpointError, ConfigError
from residency.runtime.architecture import Architecture
from residency.runtime.models.base import Model
from residency.runtime.route_tables import MODEL
from residency.runtime.weights import MadeUpWeights, Weights

AUTO, PLAIN = "auto", "bf16"
# Each format, and the quantization_config that a checkpoint of it has.
DECLARED: dict[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
}


class MadeUp(Model):
    """Says a model's type and sizes, as its config.json would."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Model.Config):
        """layers: the first so many of the model's layers; 0 takes all.
        format: of the experts: auto (the model's own, plain ones in model.dtype), bf16, fp8_block,
            nvfp4 or mxfp4.
        seed: of the weights, and of routes that are made up.
        """

        layers: int = 0
        format: str = AUTO
        seed: int = 0

    model_type: ClassVar[str]
    sizes: ClassVar[Mapping[str, Any]]  # keys of transformers' config class
    own_format: ClassVar[str] = PLAIN
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
    def format(self) -> str:
        """A key of DECLARED. Raises ConfigError for a format that there is not."""
        wanted = self.config.format
        if wanted not in (AUTO, *DECLARED):
            known = ", ".join((AUTO, *DECLARED))
            raise ConfigError(f"model.format={wanted}: it must be one of {known}")
        return self.own_format if wanted == AUTO else wanted

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def architecture(self) -> Architecture:
        sizes = {**self.sizes, "num_hidden_layers": self.num_layers}
        if (declared := DECLARED[self.format]) is not None:
            sizes["quantization_config"] = dict(declared)
        config = AutoConfig.for_model(self.model_type, **sizes)
        source = f"model={self.name}"
        return Architecture.from_config(config, self.config.dtype, source, self.table_rows)

    def weights(self) -> Weights:
        return MadeUpWeights(self.architecture, self.config.seed)

    def notes(self) -> list[str]:
        all_layers = self.sizes["num_hidden_layers"]
        stored = self.architecture.format.name
        made_up = (
            f"weights: made up ({self.num_layers} of {all_layers} layers), experts in {stored}"
        )
        return [made_up, *(super().notes() or [f"routing: {MODEL} (routers are made up too)"])]

    def faults(self) -> Iterator[Conflict]:
        if not 0 <= self.config.layers <= self.sizes["num_hidden_layers"]:
            reason = f"the model has {self.sizes['num_hidden_layers']} layers (0: all)"
            yield Conflict((f"model.layers={self.config.layers}",), reason, "model.layers=0")
            return
        if not 0 <= self.config.seed < 1 << 63:
            key, reason = f"model.seed={self.config.seed}", "it must be from 0 to 2^63 - 1"
            yield Conflict((key,), reason, "model.seed=0")
        if (fault := self._format_fault()) is not None:
            mend = PLAIN if self.config.format == AUTO else AUTO
            key = f"model.format={self.config.format}"
            yield Conflict((key,), fault, f"model.format={mend}")
            return
        yield from super().faults()

    def _format_fault(self) -> str | None:
        """Why the experts cannot be stored as asked; a fault of another key is not told here."""
        try:
            format = self.format
        except ConfigError as error:
            return str(error).partition(": ")[2]
        if self.config.format == PLAIN and self.config.dtype not in (AUTO, "bfloat16"):
            return f"model.dtype={self.config.dtype} stores plain experts in that dtype"
        if DECLARED[format] is None:
            return None
        try:
            _ = self.architecture.layout
        except CheckpointError as error:
            return str(error)
        except ConfigError:
            return None
        return None
