"""The model's shape, read from its config before any weight: a skeleton on the meta device.

transformers decides what the model is; here we only find its experts modules (they carry
`is_transposed`) and note their tensors' names and shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from residency.policies.errors import CheckpointError, ConfigError, one_line
from residency.policies.step import IdSpace
from residency.runtime.cache_sizes import cache_bytes, snapshot_bytes
from residency.runtime.formats import ExpertFormat, detect
from residency.runtime.host_tables import TableShape, tables_of
from residency.runtime.layout import RowLayout
from residency.runtime.names import Names
from residency.runtime.workspace import Workspace

CONFIG_NAME = "config.json"
MODELOPT_NAME = "hf_quant_config.json"  # where ModelOpt says it, beside or instead of config.json
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Architecture:
    """What a config of transformers describes.

    source: where the config is from, for messages.
    expert_modules: the experts modules' names, in the order of the MoE layers.
    quantization: how the checkpoint is quantised, as it says itself; None: it is not. The library
        never sees it: what it would do with it, loading does here.
    format_source: the file that says how experts are stored, for messages.
    table_rows: rows that a host table is cut to where weights are made up; 0 keeps all.
    """

    source: str
    config: Any
    skeleton: PreTrainedModel
    expert_modules: tuple[str, ...]
    dtype: torch.dtype
    quantization: Mapping[str, Any] | None = None
    format_source: str = ""
    table_rows: int = 0

    @classmethod
    def of(cls, folder: Path, dtype: str) -> Architecture:
        """Of a model folder. Raises CheckpointError for one without a usable MoE config."""
        made = cls.from_config(_load_config(folder), dtype, str(folder / CONFIG_NAME))
        if made.quantization is None and (folder / MODELOPT_NAME).is_file():
            file = folder / MODELOPT_NAME
            return replace(made, quantization=_read_object(file), format_source=str(file))
        return made

    @classmethod
    def from_config(cls, config: Any, dtype: str, source: str, table_rows: int = 0) -> Architecture:
        """Of a config object. Raises CheckpointError for one without experts."""
        config, quantization = _without_quantization(config)
        skeleton = _skeleton(source, config)
        names = tuple(n for n, m in skeleton.named_modules() if hasattr(m, "is_transposed"))
        if not names:
            raise CheckpointError(
                f"{source}: {config.model_type} has no experts that transformers "
                "can hand over; only Mixture-of-Experts models can be run"
            )
        chosen = _dtype(dtype, config)
        return cls(source, config, skeleton, names, chosen, quantization, source, table_rows)

    def experts(self, layer: int) -> Any:
        return self.skeleton.get_submodule(self.expert_modules[layer])

    @cached_property
    def expert_classes(self) -> frozenset[type[torch.nn.Module]]:
        return frozenset(type(self.experts(i)) for i in range(len(self.expert_modules)))

    @cached_property
    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one expert's tensors, by parameter name; equal in every layer."""
        per_layer = [
            {n: tuple(p.shape[1:]) for n, p in self.experts(i).named_parameters()}
            for i in range(len(self.expert_modules))
        ]
        if any(shapes != per_layer[0] for shapes in per_layer):
            raise CheckpointError(f"{self.source}: layers with experts of different shapes")
        return per_layer[0]

    @cached_property
    def space(self) -> IdSpace:
        text_config = self.config.get_text_config()
        num_experts = next(self.experts(0).parameters()).shape[0]
        return IdSpace(len(self.expert_modules), num_experts, text_config.num_experts_per_tok)

    @cached_property
    def format(self) -> ExpertFormat:
        """Of the experts. Raises CheckpointError for one that is not supported."""
        try:
            return detect(self.quantization, self.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.format_source}: {error}") from error

    @cached_property
    def layout(self) -> RowLayout:
        """Raises CheckpointError for a format that is not supported or cannot hold the experts."""
        shapes, transposed = self.expert_shapes, self.experts(0).is_transposed
        down = shapes["down_proj"]
        hidden, width = reversed(down) if transposed else down
        if (fault := self.format.fault(hidden, width)) is not None:
            raise CheckpointError(f"{self.source}: {fault}")
        return RowLayout.of(shapes, self.format, self.dtype, transposed=transposed)

    @property
    def max_context(self) -> int:
        """Most tokens the model was made for. Raises CheckpointError where the config is silent."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if not limit:
            raise CheckpointError(
                f"{self.source}: no max_position_embeddings there; set model.context"
            )
        return int(limit)

    @cached_property
    def tables(self) -> tuple[TableShape, ...]:
        """Embeddings that stay on the host and are read by row."""
        return tables_of(self.skeleton, self.expert_modules, self.table_rows)

    @property
    def table_reads(self) -> list[tuple[int, int]]:
        """MoE layers beside a host table, and the bytes that a token reads of it."""
        size = self.dtype.itemsize
        return [(table.layer, table.elements_per_token * size) for table in self.tables]

    @cached_property
    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters that are neither experts' nor host tables, by name."""
        own = {f"{name}.{part}" for name in self.expert_modules for part in self.expert_shapes}
        own |= {f"{table.name}.weight" for table in self.tables}
        return {n: tuple(p.shape) for n, p in self.skeleton.named_parameters() if n not in own}

    @property
    def num_other_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.other_shapes.values())

    def cache_bytes(self, num_tokens: int) -> int:
        """What one sequence of `num_tokens` keeps on the device; see `cache_sizes`."""
        return cache_bytes(self.config, num_tokens, self.dtype.itemsize)

    def snapshot_bytes(self, num_tokens: int) -> int:
        """Of a snapshot of such a sequence; 0 where going back needs none."""
        return snapshot_bytes(self.config, num_tokens, self.dtype.itemsize)

    @cached_property
    def workspace(self) -> Workspace:
        """What steps take beside all that stays."""
        written_out = self.skeleton.config._attn_implementation == "eager"
        element = self.dtype.itemsize
        return Workspace(self.config, self.space, element, self.expert_shapes, written_out)

    @cached_property
    def names(self) -> Names:
        """Where a checkpoint's tensors go."""
        return Names(self.skeleton)


def _load_config(folder: Path) -> Any:
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder}: no config.json there; name a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{folder / CONFIG_NAME}: cannot be read: {reason}") from error


def _without_quantization(config: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """The config without what it says of quantisation, and that."""
    config, found = deepcopy(config), None
    for holder in (config.get_text_config(), config):
        declared = getattr(holder, "quantization_config", None)
        if declared is not None:
            found = declared if isinstance(declared, Mapping) else declared.to_dict()
            del holder.quantization_config
    return config, found


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {one_line(str(error))}") from error


def _skeleton(source: str, config: Any) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{source}: transformers cannot build a causal language model from it: {reason}"
        ) from error


def _dtype(name: str, config: Any) -> torch.dtype:
    if name == "auto":
        declared = config.get_text_config().dtype
        return declared if isinstance(declared, torch.dtype) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"model.dtype={name}: it must be one of {', '.join(('auto', *DTYPES))}")
    return DTYPES[name]
