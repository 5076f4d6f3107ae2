"""fp8_block: e4m3 elements under fp32 scales of 128 x 128 blocks, as DeepSeek-V3 introduced them.

weight = element * scale; checkpoints call the scale `weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from residency.runtime.formats.base import (
    ELEMENTS,
    SCALE,
    ExpertFormat,
    StoredPart,
    work_dtype,
)

BLOCK = 128
MAX = 448.0  # the largest e4m3
_SCALE_ENDING = "_scale_inv"
_IGNORED = (".input_scale", ".activation_scale")


@dataclass(frozen=True)
class Fp8Block(ExpertFormat):
    """float8_e4m3fn [n, k]; "scale" fp32 [ceil(n / 128), ceil(k / 128)]."""

    @property
    def name(self) -> str:
        return "fp8_block"

    def stored(self, n: int, k: int) -> tuple[StoredPart, ...]:
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        return (
            StoredPart(ELEMENTS, (n, k), torch.float8_e4m3fn),
            StoredPart(SCALE, blocks, torch.float32),
        )

    def dequantise(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        elements = stored[ELEMENTS].to(work_dtype(dtype))
        scale = _spread(stored[SCALE], elements.shape[-2], elements.shape[-1])
        return elements.mul_(scale).to(dtype)

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        n, k = matrix.shape[-2:]
        wide = matrix.float()
        short = (0, -k % BLOCK, 0, -n % BLOCK)
        blocks = torch.nn.functional.pad(wide, short).unflatten(-1, (-1, BLOCK))
        blocks = blocks.unflatten(-3, (-1, BLOCK))
        scale = blocks.abs().amax((-3, -1)) / MAX
        scale[scale == 0] = 1.0
        elements = (wide / _spread(scale, n, k)).to(torch.float8_e4m3fn)
        return {ELEMENTS: elements, SCALE: scale}

    def source(self, key: str) -> tuple[str, str] | None:
        if key.endswith(_SCALE_ENDING):
            return key.removesuffix(_SCALE_ENDING), SCALE
        return super().source(key)

    def ignores(self, key: str) -> bool:
        return key.endswith(_IGNORED)

    def convert(self, suffix: str, tensor: Tensor) -> Tensor:
        return tensor.float() if suffix == SCALE else tensor

    def fault(self, hidden: int, width: int) -> str | None:
        if width % BLOCK:
            return (
                f"experts {width} wide cannot be fp8_block: gate and up are joined, so the width "
                f"must be a multiple of {BLOCK}"
            )
        return None


def _spread(scale: Tensor, n: int, k: int) -> Tensor:
    """One scale for each element, [..., n, k]."""
    rows = scale.repeat_interleave(BLOCK, dim=-2)[..., :n, :]
    return rows.repeat_interleave(BLOCK, dim=-1)[..., :k]
