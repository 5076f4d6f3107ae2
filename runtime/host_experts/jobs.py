"""A job: one layer's experts for a fixed number of tokens, as tensors in host memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from residency.policies.step import IdSpace
from residency.runtime.host_experts import native
from residency.runtime.layout import RowLayout


@dataclass(frozen=True, eq=False)
class HostJob:
    """What is read and written, pinned where a device shares it. Made once, run many times.

    x_TH: in the model's dtype. ids_TK: int32, within the layer; an id that no expert has is passed
    over. weights_TK: fp32. chosen_E: uint8, 1 where the host is to compute the expert.
    y_TH: fp32, written: the sum over a token's chosen experts of weight * expert(x), zero for none.
    stats: int64 [3], added to: nanoseconds, distinct experts computed, runs.
    """

    layer: int
    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    chosen_E: Tensor
    y_TH: Tensor
    stats: Tensor
    native: native.Job

    @classmethod
    def empty(
        cls, layer: int, num_tokens: int, space: IdSpace, hidden: int, dtype: torch.dtype, pin: bool
    ) -> HostJob:
        """Nothing chosen, all zeros; the library's part only says where the tensors lie."""

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        tensors = {
            "x": zeros((num_tokens, hidden), dtype),
            "ids": zeros((num_tokens, space.top_k), torch.int32),
            "weights": zeros((num_tokens, space.top_k), torch.float32),
            "chosen": zeros((space.num_experts,), torch.uint8),
            "y": zeros((num_tokens, hidden), torch.float32),
            "stats": zeros((3,), torch.int64),
        }
        job = native.Job(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
        job.T, job.K, job.E, job.H = num_tokens, space.top_k, space.num_experts, hidden
        x, ids, weights, chosen, y, stats = tensors.values()
        return cls(layer, x, ids, weights, chosen, y, stats, job)

    @property
    def address(self) -> int:
        """For `NativeHostExperts.function_address`; good while the job and its experts live."""
        return ctypes.addressof(self.native)


class Sizes(NamedTuple):
    """hidden and width of an expert, and whether its matrices are stored as [k, n]."""

    hidden: int
    width: int
    transposed: bool

    @classmethod
    def of(cls, layout: RowLayout) -> Sizes:
        rows, columns = next(p.shape for p in layout.parts if p.name == "gate_up_proj")
        if getattr(layout.format, "transposed", False):
            return cls(rows, columns // 2, True)
        hidden = next(p.shape[0] for p in layout.parts if p.name == "down_proj")
        return cls(hidden, rows // 2, False)


def offsets(layout: RowLayout, matrix: str) -> native.Offsets:
    """Where the parts of "gate_up_proj" or "down_proj" lie."""
    at = {part.name: part.offset for part in layout.parts}
    names = (matrix, f"{matrix}.scale", f"{matrix}.outer", f"{matrix}_bias")
    return native.Offsets(*(at.get(name, native.ABSENT) for name in names))
