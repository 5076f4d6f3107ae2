"""Constants from a machine profile: a model's arithmetic and bytes at the rates of the machine.

An estimate, for models that were never benched here: products run at EFFICIENCY of the rate of a
large one, a layer costs what a small model's does beside that, a decode step reads every weight it
needs once, at twice the rate of a copy, which reads and writes.
"""

from __future__ import annotations

import math

from residency.runtime.architecture import Architecture
from residency.runtime.forecast.constants import Constants, HostLine
from residency.runtime.forecast.decode import Unknown
from residency.runtime.machine.measurement import (
    CHUNK_LAYER,
    DECODE_LAYER,
    DEVICE_COPY,
    GATHER,
    GEMM_BF16,
    GEMM_FP32,
    LINK,
    LINK_PAGEABLE,
)
from residency.runtime.machine.profile import MachineProfile
from residency.runtime.machine.starts import known_rates

EFFICIENCY = 0.5
LENGTHS = tuple(1 << i for i in range(0, 18))
INPUT_TABLES, HEAD = ("embed_tokens", "wte"), "lm_head"


def machine_constants(profile: MachineProfile, architecture: Architecture) -> Constants:
    """Raises Unknown where the profile lacks a measurement that all depends on."""
    link = _needed(profile, "the link's rate", LINK, LINK_PAGEABLE)
    overhead = _needed(profile, "the time of a layer", CHUNK_LAYER)
    step_layer = _needed(profile, "the time of a decode step's layer", DECODE_LAYER)
    names = (GEMM_FP32, GEMM_BF16) if architecture.dtype.itemsize > 2 else (GEMM_BF16, GEMM_FP32)
    rate = EFFICIENCY * _needed(profile, "the rate of matrix products", *names)
    copy = _needed(profile, "the rate of copies on the device", DEVICE_COPY)
    layers = architecture.config.get_text_config().num_hidden_layers
    chunk_s = tuple((n, layers * overhead + operations(architecture, n) / rate) for n in LENGTHS)
    lines = known_rates(profile, architecture.layout)
    known = None if lines is None else tuple(HostLine(*line) for line in lines)
    row_bytes = architecture.layout.row_bytes
    return Constants(
        link_bytes_s=link,
        gather_bytes_s=profile.rate(GATHER) or link,
        device_copy_bytes_s=copy,
        chunk_s=chunk_s,
        step_s=layers * step_layer + step_bytes(architecture) / (2 * copy),
        host=None if known is None else known[1],
        host_beside=None if known is None else known[3],
        gather_beside_bytes_s=None if known is None else row_bytes / known[2].each_s,
        beside=str(profile.environment.get("device", "")).startswith("cuda"),
        sources=(
            f"rates of {profile.device_name}, measured {profile.date[:10]} by `residency doctor`; "
            "compute estimated from the model's shape",
        ),
    )


def operations(architecture: Architecture, num_tokens: int) -> float:
    """Multiplications and additions of a chunk: two a weight and token, attention over the chunk
    itself, and the head for its last token.
    """
    space, config = architecture.space, architecture.config.get_text_config()
    experts = sum(map(math.prod, (s for s in architecture.expert_shapes.values() if len(s) > 1)))
    head = sum(math.prod(s) for n, s in _matrices(architecture) if HEAD in n)
    dense = sum(math.prod(s) for n, s in _matrices(architecture) if HEAD not in n)
    each = 2 * (dense + space.num_layers * space.top_k * experts)
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
    attention = 2 * config.num_hidden_layers * width * num_tokens**2
    return float(num_tokens * each + attention + 2 * head)


def step_bytes(architecture: Architecture) -> float:
    """Weights that a decode step of one token reads on the device, every expert a hit."""
    space = architecture.space
    dense = sum(math.prod(shape) for _, shape in _matrices(architecture))
    experts = space.num_layers * space.top_k * architecture.layout.row_bytes
    return float(dense * architecture.dtype.itemsize + experts)


def _matrices(architecture: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    """Those that a token is multiplied with; a table of inputs is looked up."""
    tied = getattr(architecture.config.get_text_config(), "tie_word_embeddings", False)
    return [
        (HEAD if tied and name.endswith("embed_tokens.weight") else name, shape)
        for name, shape in architecture.other_shapes.items()
        if len(shape) > 1 and (tied or not any(table in name for table in INPUT_TABLES))
    ]


def _needed(profile: MachineProfile, what: str, *names: str) -> float:
    rate = profile.rate(*names)
    if rate is None:
        raise Unknown(f"{what} is not in the machine's profile; run `residency doctor` again")
    return rate
