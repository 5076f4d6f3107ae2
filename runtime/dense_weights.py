"""Dense weights: all of a checkpoint that is not experts, dequantised where it is quantised.

transformers loads the model by its own mapping from tensors that are read when it asks for them,
so nothing is held twice. The experts are not among them: while the library builds the model,
experts modules come without their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from residency.policies.errors import CheckpointError, one_line
from residency.runtime.architecture import Architecture
from residency.runtime.bank_reader import require_finite
from residency.runtime.checkpoint import Checkpoint, Entry
from residency.runtime.expert_sources import ExpertSources, plain_key, stored_form
from residency.runtime.host_tables import without_tables
from residency.runtime.shards import Shards, bytes_of


class DenseTensor:
    """One weight as the library takes it from a file: it has shape and dtype, and `[...]` reads it.

    stored: the entries by suffix; more than one where the weight is quantised.
    """

    def __init__(self, key: str, stored: dict[str, Entry], architecture: Architecture) -> None:
        """Raises CheckpointError naming file and key of what cannot be read as a weight."""
        self.key = key
        self.stored = stored
        self._architecture = architecture
        self.shards: Shards | None = None
        self._forms: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {}
        self.quantised = set(stored) != {""}
        self.entry = next(iter(stored.values()))

    @property
    def dtype(self) -> torch.dtype:
        return self._architecture.dtype if self.quantised else self.entry.dtype

    def check(self, shape: tuple[int, ...] | None) -> None:
        """Against the parameter's shape, if that is known. Raises CheckpointError."""
        if self.quantised:
            self._check_stored(shape)
        elif shape is not None:
            if self.entry.shape != shape:
                raise CheckpointError(
                    f"{self.entry} has shape {list(self.entry.shape)}, but the config makes it "
                    f"{list(shape)}"
                )
            if not self.entry.dtype.is_floating_point or self.entry.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{self.entry} has dtype {self.entry.dtype_name} and no scale beside it"
                )

    def _check_stored(self, shape: tuple[int, ...] | None) -> None:
        expert_format = self._architecture.format
        if shape is None or len(shape) != 2:
            raise CheckpointError(f"{self.entry}: quantised, but not the weight of a linear layer")
        for part in expert_format.stored(*shape):
            if (entry := self.stored.get(part.suffix)) is None:
                raise CheckpointError(
                    f"{self.entry} has no {part.suffix or 'elements'} of {self.key} beside it"
                )
            form = stored_form(expert_format, entry, part.suffix, part.shape, part.dtype)
            self._forms[part.suffix] = form
        self._parts = {part.suffix: part for part in expert_format.stored(*shape)}

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """The weight, in the model's dtype if it was quantised."""
        assert self.shards is not None, "read while the model is loaded"
        if not self.quantised:
            return self.shards.tensor(self.entry)
        parts = {}
        for suffix, part in self._parts.items():
            tensor = self.shards.tensor(self.stored[suffix])
            if (form := self._forms[suffix]) is not None:
                tensor = form(tensor)
            tensor = tensor.to(part.dtype)
            if suffix:
                require_finite(self.stored[suffix], bytes_of(tensor), part.dtype)
            parts[suffix] = tensor.expand(part.shape)
        return self._architecture.format.dequantise(parts, self._architecture.dtype)


class DenseWeights:
    """The weights of a checkpoint that are not experts'."""

    def __init__(
        self, architecture: Architecture, checkpoint: Checkpoint, sources: ExpertSources
    ) -> None:
        """Raises CheckpointError naming file and key of one that is misshapen."""
        self._architecture = architecture
        self._checkpoint = checkpoint
        grouped: dict[str, dict[str, Entry]] = {}
        experts = sources.keys()
        tables = {f"{table.name}.weight" for table in architecture.tables}
        for entry in checkpoint.entries.values():
            if entry.key in experts or (plain := plain_key(architecture.format, entry.key)) is None:
                continue
            key, suffix = plain
            if tables and architecture.names.locate(key).name in tables:
                continue
            if (other := grouped.setdefault(key, {}).get(suffix)) is not None:
                raise CheckpointError(f"{entry} is {key} as well as {other}")
            grouped[key][suffix] = entry
        self.tensors = {k: DenseTensor(k, stored, architecture) for k, stored in grouped.items()}
        self.dequantised_bytes = sum(self._check(tensor) for tensor in self.tensors.values())
        self.unneeded: list[str] = []  # known when the model is loaded

    def _check(self, tensor: DenseTensor) -> int:
        """Returns the bytes that it takes dequantised: 0 for a plain one."""
        target = self._architecture.names.locate(tensor.key)
        shape = self._architecture.other_shapes.get(target.name)
        if shape is None:  # the model has no such weight, so it is never read
            return 0
        tensor.check(None if target.converted else shape)
        return math.prod(shape) * self._architecture.dtype.itemsize if tensor.quantised else 0

    def load(self, device: torch.device) -> PreTrainedModel:
        """The model without experts, on `device`, in eval mode.

        Raises CheckpointError for a tensor that is missing or cannot be read.
        """
        architecture, folder = self._architecture, self._checkpoint.folder
        bare = without_experts(architecture.expert_classes)
        with Shards() as shards, _quiet(), bare, without_tables(architecture.tables):
            for tensor in self.tensors.values():
                tensor.shards = shards
            try:
                model, info = type(architecture.skeleton).from_pretrained(
                    None,
                    config=architecture.skeleton.config,  # a wrapper's inner one
                    state_dict=dict(self.tensors),
                    dtype=architecture.dtype,
                    output_loading_info=True,
                )
            except (RuntimeError, ValueError) as error:
                reason = one_line(str(error))
                raise CheckpointError(f"{folder}: transformers cannot load it: {reason}") from error
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(f"{folder}: tensor {missing[0]} is missing")
        self.unneeded = sorted(info["unexpected_keys"])
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
        return loaded


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
    """No report of unexpected keys and no progress bars of the library."""
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
