"""Names: where a checkpoint's tensor goes in the model, by transformers' own conversion mapping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

EXPERTS_DIM = 1  # of a layer's experts [E, N, K], the dimension along which sources are joined


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter, and which part of it a checkpoint tensor is.

    name: of the parameter.
    index, count: its place among the sources that are concatenated along each expert's first
        dimension, e.g. gate and up.
    converted: the library does more than rename, so the shapes may differ.
    obstacle: an operation other than stacking and concatenating, or "".
    """

    name: str
    index: int = 0
    count: int = 1
    converted: bool = False
    obstacle: str = ""


class Names:
    """The mapping of one model."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        self._skeleton = skeleton

    def locate(self, key: str) -> Target:
        """Of the key that a plain weight has; which expert it is of, the key itself says."""
        renamings, converters = self._transforms
        prefix, own = self._skeleton.base_model_prefix, self._parameters
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:  # as the library does
            name, pattern = rename_source_key(key, [], [], prefix, own)
        for converter in converters if pattern is not None else ():
            if pattern in converter.source_patterns:
                sources = list(converter.source_patterns)
                index, obstacle = sources.index(pattern), _obstacle(converter)
                return Target(name, index, len(sources), True, obstacle)
        return Target(name)

    @cached_property
    def _parameters(self) -> dict[str, object]:
        return dict(self._skeleton.state_dict())

    @cached_property
    def _transforms(self) -> tuple[list[WeightRenaming], list[WeightConverter]]:
        transforms = get_model_conversion_mapping(self._skeleton)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        return renamings, [t for t in transforms if isinstance(t, WeightConverter)]


def _obstacle(converter: WeightConverter) -> str:
    """The first operation that is no mere laying of expert after expert, source after source."""
    for operation in converter.operations:
        merges = isinstance(operation, MergeModulelist) and operation.dim == 0
        joins = isinstance(operation, Concatenate) and operation.dim == EXPERTS_DIM
        if not (merges or joins):
            return type(operation).__name__
    return ""
