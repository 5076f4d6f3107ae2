"""The model's shape, read from its config before any weight: a skeleton on the meta device.

transformers decides what the model is; here we only find its experts modules (they carry
`is_transposed`) and note their tensors' names and shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from residency.policies.errors import CheckpointError, ConfigError
from residency.policies.step import IdSpace
from residency.runtime.host_tables import TableShape, tables_of
from residency.runtime.layout import RowLayout

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
    table_rows: rows that a host table is cut to where weights are made up; 0 keeps all.
    """

    source: str
    config: Any
    skeleton: PreTrainedModel
    expert_modules: tuple[str, ...]
    dtype: torch.dtype
    table_rows: int = 0

    @classmethod
    def of(cls, folder: Path, dtype: str) -> Architecture:
        """Of a model folder. Raises CheckpointError for one without a usable MoE config."""
        return cls.from_config(_load_config(folder), dtype, str(folder / "config.json"))

    @classmethod
    def from_config(cls, config: Any, dtype: str, source: str, table_rows: int = 0) -> Architecture:
        """Of a config object. Raises CheckpointError for one without experts."""
        skeleton = _skeleton(source, config)
        names = tuple(n for n, m in skeleton.named_modules() if hasattr(m, "is_transposed"))
        if not names:
            raise CheckpointError(
                f"{source}: {config.model_type} has no experts that transformers "
                "can hand over; only Mixture-of-Experts models can be run"
            )
        chosen = _dtype(dtype, config)
        return cls(source, config, skeleton, names, chosen, table_rows)

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
    def layout(self) -> RowLayout:
        return RowLayout.of(self.expert_shapes, self.dtype)

    @property
    def max_context(self) -> int:
        limit: int = self.config.get_text_config().max_position_embeddings
        return limit

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

    def kv_elements(self, num_tokens: int) -> int:
        """Elements of all that a sequence of `num_tokens` keeps: keys and values, an indexer's
        keys, and the states of linear attention, whatever the length.
        """
        config = self.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
        linear = kinds.count("linear_attention")
        attention = len(kinds) - linear
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        per_token = attention * 2 * heads * width
        if ratio := getattr(config, "indexer_compress_ratio", None):
            # A token's key and its part of a block's; the angles, which layers share.
            per_token += attention * (
                config.indexer_head_dim + -(-config.indexer_head_dim // ratio)
            )
            per_token += 2 * int(width * config.rope_parameters.get("partial_rotary_factor", 1.0))
        kept = int(per_token * num_tokens)
        return kept + linear * self._state_elements(config) if linear else kept

    def _state_elements(self, config: Any) -> int:
        """Of one layer of linear attention: an fp32 matrix a head, and a convolution's inputs."""
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        state = values * key_dim * value_dim * torch.float32.itemsize // self.dtype.itemsize
        width = 2 * keys * key_dim + values * value_dim
        return int(state + width * config.linear_conv_kernel_dim)

    def workspace_elements(self, num_tokens: int) -> int:
        """Elements of a chunk's largest activations: each token's top-k results and residuals,
        and the attention mask and logits beside them.
        """
        config = self.config.get_text_config()
        streams = getattr(config, "hc_count", 1)  # residual streams side by side
        per_token = config.hidden_size * (2 * self.space.top_k + 8 * streams)
        return int(num_tokens * per_token + config.vocab_size)

    @cached_property
    def _transforms(self) -> tuple[list[WeightRenaming], list[WeightConverter]]:
        transforms = get_model_conversion_mapping(self.skeleton)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        return renamings, [t for t in transforms if isinstance(t, WeightConverter)]

    def locate(self, key: str) -> tuple[str, int, int]:
        """Where a checkpoint tensor goes: parameter name, and which of how many sources it is.

        Several sources are concatenated along each expert's first dimension, e.g. gate and up.
        """
        renamings, converters = self._transforms
        prefix = self.skeleton.base_model_prefix
        name, pattern = rename_source_key(
            key, renamings, converters, prefix, self.skeleton.state_dict()
        )
        for converter in converters:
            if pattern in converter.source_patterns:
                sources = list(converter.source_patterns)
                return name, sources.index(pattern), len(sources)
        return name, 0, 1


def _load_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json there; name a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{folder / 'config.json'}: cannot be read: {reason}") from error


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
