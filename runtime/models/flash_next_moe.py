"""flash_next_moe: the experts of Qwen3.8-Flash-Next under plain attention, made-up weights.

48 layers x 512 experts, top-10, as a Qwen3-MoE model: the shape for comparing residency alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residency.runtime.models.made_up import MadeUp


class FlashNextMoe(MadeUp):
    """An expert is 2.76 MB in its own nvfp4, 9.8 MB in bfloat16: mind `layers`."""

    model_type: ClassVar[str] = "qwen3_moe"
    own_format: ClassVar[str] = "nvfp4"
    sizes: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 48,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "intermediate_size": 6400,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
