"""mxfp4: e2m1 elements with a power of two for each 32 of them (OCP Microscaling, MXFP4).

weight = element * 2 ^ (scale - 127); a scale of 255 is no number. Checkpoints as gpt-oss has
them: `X_blocks` and `X_scales`, all experts of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from residency.runtime.formats import e2m1
from residency.runtime.formats.base import (
    ELEMENTS,
    SCALE,
    ExpertFormat,
    StoredPart,
    work_dtype,
)

GROUP = 32
_BIAS = 127
_LARGEST_EXPONENT = 2  # of e2m1
_ENDINGS = {"_blocks": ELEMENTS, "_scales": SCALE}


@dataclass(frozen=True)
class Mxfp4(ExpertFormat):
    """uint8 [n, k / 2]; "scale" uint8 [n, k / 32], the exponents (e8m0)."""

    @property
    def name(self) -> str:
        return "mxfp4"

    def stored(self, n: int, k: int) -> tuple[StoredPart, ...]:
        return (
            StoredPart(ELEMENTS, (n, k // 2), torch.uint8),
            StoredPart(SCALE, (n, k // GROUP), torch.uint8),
        )

    def dequantise(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        wide = work_dtype(dtype)
        values = e2m1.unpack(stored[ELEMENTS], wide).unflatten(-1, (-1, GROUP))
        values *= stored[SCALE].view(torch.float8_e8m0fnu).to(wide)[..., None]
        weights: Tensor = values.flatten(-2).to(dtype)
        return weights

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """By the specification's rule: the group's exponent less e2m1's, the elements clamped."""
        groups = matrix.float().unflatten(-1, (-1, GROUP))
        exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1 - _LARGEST_EXPONENT
        exponent = exponent.clamp(-_BIAS, _BIAS)
        values = torch.ldexp(groups, -exponent[..., None])
        return {
            ELEMENTS: e2m1.pack(values.flatten(-2)),
            SCALE: (exponent + _BIAS).to(torch.uint8),
        }

    def source(self, key: str) -> tuple[str, str] | None:
        for ending, suffix in _ENDINGS.items():
            if key.endswith(ending):
                return key.removesuffix(ending), suffix
        return super().source(key)

    def convert(self, suffix: str, tensor: Tensor) -> Tensor:
        """Blocks are [..., n, k / 32, 16]; a bias passes as it is."""
        is_blocks = suffix == ELEMENTS and tensor.dtype == torch.uint8
        return tensor.flatten(-2) if is_blocks else tensor

    def fault(self, hidden: int, width: int) -> str | None:
        if hidden % GROUP or width % GROUP:
            return (
                f"experts of {hidden} x {width} cannot be mxfp4: both sizes must be multiples "
                f"of {GROUP}"
            )
        return None
