"""qwen3_30b_a3b: the shape of Qwen3-30B-A3B, 48 layers x 128 experts, top-8, made-up weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residency.runtime.models.made_up import MadeUp


class Qwen330bA3b(MadeUp):
    """An expert is 9.4 MB in bfloat16, all of them 58 GB."""

    model_type: ClassVar[str] = "qwen3_moe"
    sizes: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
