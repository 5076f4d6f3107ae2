"""Loading: experts go from safetensors straight into the banks, all else into the model.

The experts are never held a second time: while transformers builds the model, experts modules
come without their parameters, so their tensors are unexpected keys to it and are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture
from residency.runtime.banks import Banks
from residency.runtime.checkpoint import Checkpoint, Entry, opened
from residency.runtime.host_tables import without_tables

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all

EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the part of a layer's expert tensors that it fills.

    expert: the expert it belongs to, or None if it holds all experts of the layer.
    index of count: its place among the sources concatenated into the parameter.
    """

    entry: Entry
    layer: int
    part: str
    expert: int | None
    index: int
    count: int


def load_banks(
    architecture: Architecture, checkpoint: Checkpoint, progress: Progress | None = None
) -> Banks:
    """Read every expert tensor once, into its place.

    Raises CheckpointError naming file and tensor for one that is misshapen, and naming the tensor
    for one that is missing.
    """
    sources = list(_expert_sources(architecture, checkpoint))
    _require_complete(architecture, checkpoint, sources)
    banks = Banks(architecture.space, architecture.layout)
    done = 0
    for file in dict.fromkeys(source.entry.file for source in sources):
        with opened(file) as shard:
            for source in (s for s in sources if s.entry.file == file):
                tensor = shard.get_tensor(source.entry.key)
                place = _place(banks, source)
                _require_shape(source.entry, tuple(place.shape))
                place.copy_(tensor)
                done += place.nbytes
                if progress is not None:
                    progress("experts", done, banks.num_bytes)
    return banks


def load_model(
    architecture: Architecture, checkpoint: Checkpoint, device: torch.device
) -> PreTrainedModel:
    """Everything but experts and host tables, on `device`, in eval mode.

    Raises CheckpointError for a tensor that is misshapen or missing.
    """
    for entry in checkpoint.entries.values():
        name, _, count = architecture.locate(entry.key)
        if count == 1 and (shape := architecture.other_shapes.get(name)) is not None:
            _require_shape(entry, shape)
    bare = without_experts(architecture.expert_classes)
    with _quiet(), bare, without_tables(architecture.tables):
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=architecture.config,
            dtype=architecture.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{checkpoint.folder}: tensor {missing[0]} is missing")
    model.eval()
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.to(device)
    return loaded


def _expert_sources(architecture: Architecture, checkpoint: Checkpoint) -> Iterator[Source]:
    layers = {name: i for i, name in enumerate(architecture.expert_modules)}
    for entry in checkpoint.entries.values():
        name, index, count = architecture.locate(entry.key)
        module, _, part = name.rpartition(".")
        if module in layers and part in architecture.expert_shapes:
            number = EXPERT_NUMBER.search(entry.key)
            expert = int(number[1]) if number else None
            yield Source(entry, layers[module], part, expert, index, count)


def _require_complete(
    architecture: Architecture, checkpoint: Checkpoint, sources: list[Source]
) -> None:
    """Every (layer, part, expert) must have all its sources, exactly once."""
    found: dict[tuple[int, str, int | None], set[int]] = {}
    counts = {source.part: source.count for source in sources}
    for source in sources:
        if source.expert is not None and source.expert >= architecture.space.num_experts:
            raise CheckpointError(
                f"{source.entry.file}: tensor {source.entry.key} is of an expert above the "
                f"config's {architecture.space.num_experts}"
            )
        found.setdefault((source.layer, source.part, source.expert), set()).add(source.index)
    for layer, module in enumerate(architecture.expert_modules):
        for part in architecture.expert_shapes:
            if len(found.get((layer, part, None), ())) == 1:
                continue
            for expert in range(architecture.space.num_experts):
                if len(found.get((layer, part, expert), ())) != counts.get(part, 1):
                    raise CheckpointError(
                        f"{checkpoint.folder}: the checkpoint lacks {part} of expert {expert} "
                        f"of {module}"
                    )


def _place(banks: Banks, source: Source) -> torch.Tensor:
    """The bank's view that the source fills."""
    weights = banks.weights(source.layer)[source.part]
    if source.expert is None:
        return weights
    return weights[source.expert].chunk(source.count)[source.index]


def _require_shape(entry: Entry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.key} has shape {list(entry.shape)}, but the config "
            f"makes it {list(shape)}"
        )


@contextmanager
def without_experts(classes: frozenset[type[torch.nn.Module]]) -> Iterator[None]:
    """Inside, experts modules are built without parameters and count as initialised."""
    originals: dict[Any, Any] = {cls: cls.__init__ for cls in classes}
    try:
        for cls, original in originals.items():
            cls.__init__ = _bare(original)
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


def _bare(original: Callable[..., None]) -> Callable[..., None]:
    def init(module: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            original(module, *args, **kwargs)
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            delattr(module, name)
        module._is_hf_initialized = True

    return init


@contextmanager
def _quiet() -> Iterator[None]:
    """No report of unexpected keys (they are the experts) and no progress bars of the library."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
