"""nvfp4: e2m1 elements, an e4m3 scale for each 16 of them, and a fp32 scale above.

weight = element * scale * outer. Two layouts of checkpoints are read: ModelOpt's, and that of
compressed-tensors, which keeps the reciprocal of outer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from residency.runtime.formats import e2m1
from residency.runtime.formats.base import (
    ELEMENTS,
    OUTER,
    SCALE,
    ExpertFormat,
    StoredPart,
    work_dtype,
)

GROUP = 16
_MAX_SCALE = 448.0  # the largest e4m3


class Naming(Enum):
    """Endings of a checkpoint's keys -> what they hold; ignored ones hold activation scales."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"

    @property
    def endings(self) -> dict[str, str]:
        if self is Naming.MODELOPT:
            return {".weight": ELEMENTS, ".weight_scale": SCALE, ".weight_scale_2": OUTER}
        return {".weight_packed": ELEMENTS, ".weight_scale": SCALE, ".weight_global_scale": OUTER}

    @property
    def ignored(self) -> tuple[str, ...]:
        return (".input_scale",) if self is Naming.MODELOPT else (".input_global_scale",)


@dataclass(frozen=True)
class Nvfp4(ExpertFormat):
    """uint8 [n, k / 2]; "scale" float8_e4m3fn [n, k / 16]; "outer" fp32 [2], of the first n / 2
    rows and of the rest: gate and up, or twice the same for down.
    """

    naming: Naming = Naming.MODELOPT

    @property
    def name(self) -> str:
        return "nvfp4"

    def stored(self, n: int, k: int) -> tuple[StoredPart, ...]:
        return (
            StoredPart(ELEMENTS, (n, k // 2), torch.uint8),
            StoredPart(SCALE, (n, k // GROUP), torch.float8_e4m3fn),
            StoredPart(OUTER, (2,), torch.float32),
        )

    def dequantise(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        wide = work_dtype(dtype)
        values = e2m1.unpack(stored[ELEMENTS], wide).unflatten(-1, (-1, GROUP))
        values *= stored[SCALE].to(wide)[..., None]  # exact: six bits of mantissa
        halves = values.flatten(-2).unflatten(-2, (2, -1))
        halves *= stored[OUTER].to(wide)[..., None, None]
        weights: Tensor = halves.flatten(-3, -2).to(dtype)
        return weights

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """With one outer factor for both halves, as down must have it."""
        groups = matrix.float().unflatten(-1, (-1, GROUP))
        most = groups.abs().amax(-1)  # [..., n, k / 16]
        outer = most.amax((-2, -1)) / (e2m1.MAX * _MAX_SCALE)
        outer[outer == 0] = 1.0
        scale = (most / e2m1.MAX / outer[..., None, None]).to(torch.float8_e4m3fn)
        step = scale.float() * outer[..., None, None]
        values = groups / torch.where(step == 0, 1.0, step)[..., None]
        return {
            ELEMENTS: e2m1.pack(values.flatten(-2)),
            SCALE: scale,
            OUTER: outer[..., None].repeat_interleave(2, -1),
        }

    def source(self, key: str) -> tuple[str, str] | None:
        for ending, suffix in self.naming.endings.items():
            if key.endswith(ending):
                return key.removesuffix(ending) + ".weight", suffix
        return super().source(key)

    def ignores(self, key: str) -> bool:
        return key.endswith(self.naming.ignored)

    def convert(self, suffix: str, tensor: Tensor) -> Tensor:
        if suffix == SCALE:
            return tensor.view(torch.float8_e4m3fn)
        if suffix != OUTER:
            return tensor
        outer = tensor.float()
        if self.naming is Naming.COMPRESSED_TENSORS:
            outer = 1.0 / outer
        return outer.reshape(1) if outer.numel() == 1 else outer.reshape(-1, 1)

    def fault(self, hidden: int, width: int) -> str | None:
        if hidden % GROUP or width % GROUP:
            return (
                f"experts of {hidden} x {width} cannot be nvfp4: both sizes must be multiples "
                f"of {GROUP}"
            )
        return None
