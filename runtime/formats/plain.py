"""Elements as they are, without scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from residency.runtime.formats.base import ELEMENTS, ExpertFormat, StoredPart

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Plain(ExpertFormat):
    """Row-major elements of one dtype; transposed: [k, n], as a module that says so keeps them."""

    dtype: torch.dtype
    transposed: bool = False

    @property
    def name(self) -> str:
        return NAMES[self.dtype]

    def stored(self, n: int, k: int) -> tuple[StoredPart, ...]:
        shape = (k, n) if self.transposed else (n, k)
        return (StoredPart(ELEMENTS, shape, self.dtype),)

    def dequantise(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        elements = stored[ELEMENTS].to(dtype)
        return elements.mT if self.transposed else elements

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        elements = matrix.mT if self.transposed else matrix
        return {ELEMENTS: elements.to(self.dtype).contiguous()}

    def oriented(self, transposed: bool) -> Plain:
        return replace(self, transposed=transposed)
