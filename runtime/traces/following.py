"""A trace as routes that a model follows."""

from __future__ import annotations

import numpy as np
import torch

from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace
from residency.runtime.traces.reading import read

KEY = "model.routing=trace:"


def read_trace(file: str, space: IdSpace) -> torch.Tensor:
    """int16 [N, L, K] of a trace that fits `space`.

    Raises ConfigError for a file that is missing, broken, or of another model's shape.
    """
    trace = read(file, KEY)
    if trace.space != space:
        raise ConfigError(
            f"{KEY}{file}: it was recorded on {shape_text(trace.space)}, but this model has "
            f"{shape_text(space)}"
        )
    return torch.from_numpy(trace.ids_NLK.astype(np.int16))


def shape_text(space: IdSpace) -> str:
    return f"{space.num_layers} layers x {space.num_experts} experts, top-{space.top_k}"
