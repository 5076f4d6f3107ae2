"""The interface of an expert format: how one matrix of an expert is stored.

A matrix is [n, k], n output rows and k input columns, whatever the module's own orientation. Its
stored tensors are named by a suffix: "" the elements, "scale" the scales of blocks of elements,
"outer" fp32 scales above those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

ELEMENTS, SCALE, OUTER = "", "scale", "outer"


class StoredPart(NamedTuple):
    """One stored tensor of a matrix."""

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ExpertFormat(ABC):
    """One storage form. Implementations are frozen dataclasses: equal means the same bytes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What configs and reports call it."""

    @abstractmethod
    def stored(self, n: int, k: int) -> tuple[StoredPart, ...]:
        """The stored tensors of one matrix [n, k], in row order."""

    @abstractmethod
    def dequantise(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[..., n, k] in dtype, computed in fp32 or dtype, whichever is wider; keys are suffixes.

        A view where nothing has to be computed.
        """

    @abstractmethod
    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """[..., n, k] -> its stored tensors, by suffix."""

    def source(self, key: str) -> tuple[str, str] | None:
        """A checkpoint's key -> the key that the plain weight would have, and the suffix.

        None for a tensor that holds nothing of a weight (see `ignores`). Keys that are none of
        the format's own, biases too, come back as they are, as elements.
        """
        return None if self.ignores(key) else (key, ELEMENTS)

    def ignores(self, key: str) -> bool:
        """Whether the tensor is known and not needed (the scale of an activation)."""
        return False

    def convert(self, suffix: str, tensor: Tensor) -> Tensor:
        """A checkpoint's tensor in its stored shape and dtype, a view where possible.

        Leading dimensions (experts) stay. "outer" becomes [..., 1], which fills the place of
        gate, of up, or both places of down.
        """
        return tensor

    def oriented(self, transposed: bool) -> ExpertFormat:
        """The format for a module that keeps its matrices as [k, n], where that matters."""
        return self

    def fault(self, hidden: int, width: int) -> str | None:
        """Why experts of these sizes cannot be stored so; None where they can."""
        return None


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that dequantisation computes in."""
    return torch.promote_types(dtype, torch.float32)
