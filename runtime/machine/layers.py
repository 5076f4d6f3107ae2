"""Layers: what one costs beside its arithmetic and its bytes, by a small model of made-up weights.

The model runs in the engine with every expert in a slot. Its matrices are so small that launching,
planning and waiting are nearly all that is measured; larger models add their arithmetic to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoConfig

from residency.policies.cache.lru import Lru
from residency.policies.decode.gpu import Gpu
from residency.policies.prefill.always_stream import AlwaysStream
from residency.runtime.architecture import Architecture
from residency.runtime.bench.limits import everything_resident
from residency.runtime.bench.measure import Meter, Plan
from residency.runtime.engine import Engine
from residency.runtime.machine.measurement import CHUNK_LAYER, DECODE_LAYER, SECONDS, Measurement
from residency.runtime.machine.sizes import Effort
from residency.runtime.offload import Policies
from residency.runtime.weights import MadeUpWeights

LAYERS, TOKENS, STEPS = 4, 16, 12
CONFIG = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def layers(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """A chunk's layer, mostly the host's time, and a decode step's, mostly launches in a graph."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = AutoConfig.for_model("qwen3_moe", **CONFIG)
    architecture = Architecture.from_config(config, dtype, "a small model for measuring")
    policies = Policies(
        Lru(Lru.Config(slots="all")), AlwaysStream(AlwaysStream.Config()), Gpu(Gpu.Config())
    )
    plan = Plan((TOKENS,), STEPS, TOKENS, 1, effort.repeats, 2, "cold", 0)
    weights = MadeUpWeights(architecture, 0)
    with Engine(architecture, weights, policies, device) as engine, everything_resident(engine):
        meter = Meter(engine, plan)
        decode = [run.seconds / STEPS / LAYERS for run in meter.decode().runs]
        chunk = [run.seconds / LAYERS for run in meter.resident_prefill(TOKENS).runs]
    what = f"of a model of {LAYERS} small layers, every expert in a slot"
    yield Measurement.of(CHUNK_LAYER, f"{TOKENS} tokens, {what}", SECONDS, chunk)
    yield Measurement.of(DECODE_LAYER, what, SECONDS, decode)
