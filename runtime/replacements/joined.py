"""Several projections of one input as one matrix, without a second copy of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def join(projections: list[Any]) -> Tensor:
    """One tensor of the projections' weights [outputs, inputs], which become views of it."""
    joined = torch.cat([p.weight.data for p in projections])
    parts = joined.split([p.weight.shape[0] for p in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight = nn.Parameter(part, requires_grad=False)
    return joined
