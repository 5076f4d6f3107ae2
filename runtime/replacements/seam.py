"""What a replaced layer asks of the runtime around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

AddExperts = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]


def call_and_add(
    experts: Any, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, residual_TH: Tensor
) -> Tensor:
    """The experts module called as transformers' block calls it, its result added."""
    total_TH: Tensor = residual_TH + experts(x_TH, ids_TK, weights_TK)
    return total_TH


@dataclass(frozen=True)
class Seam:
    """position_of: the number of tokens in the cache before this pass, known on the host.

    add_experts(experts module, x, ids, weights, residual) -> residual + the experts' sum [T, H];
    a runtime whose kernels add a residual themselves passes its own. Its arguments are overwritten
    when the next layer runs: what is read of them later, by the host above all, must be copied.
    """

    position_of: Callable[[], int]
    add_experts: AddExperts = call_and_add
