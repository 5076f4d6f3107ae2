"""A tiny model with made-up weights: what a combination makes of it, within a second."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig

from residency.policies.cache import CachePolicy
from residency.policies.cache.lru import Lru
from residency.policies.decode import DecodeTarget
from residency.policies.decode.gpu import Gpu
from residency.policies.prefill import PrefillMode
from residency.policies.prefill.always_stream import AlwaysStream
from residency.runtime.architecture import Architecture
from residency.runtime.engine import Engine
from residency.runtime.offload import Policies
from residency.runtime.weights import MadeUpWeights

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
PROMPT = list(range(3, 20))
NUM_NEW = 8


def combination(
    cache: CachePolicy | None = None,
    prefill: PrefillMode | None = None,
    decode: DecodeTarget | None = None,
) -> Policies:
    """Without a cache every expert has a slot."""
    return Policies(
        cache or Lru(Lru.Config(slots="all")),
        prefill or AlwaysStream(AlwaysStream.Config()),
        decode or Gpu(Gpu.Config()),
    )


def tiny_engine(policies: Policies | None = None) -> Engine:
    """The model on the CPU in float32: 3 layers of 8 experts, top-2."""
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    architecture = Architecture.from_config(config, "float32", "a tiny model")
    weights = MadeUpWeights(architecture, seed=0)
    return Engine(architecture, weights, policies or combination(), torch.device("cpu"))


def logits_of(engine: Engine, prompts: Sequence[Sequence[int]] = (PROMPT,)) -> torch.Tensor:
    """The logits behind each new token of each prompt, one after another: float32 [N, V]."""
    seen: list[torch.Tensor] = []

    def note(logits_V: torch.Tensor) -> None:
        seen.append(logits_V.clone())

    for prompt in prompts:
        engine.generate(list(prompt), max_new_tokens=NUM_NEW, ignore_eos=True, on_logits=note)
    return torch.stack(seen)
