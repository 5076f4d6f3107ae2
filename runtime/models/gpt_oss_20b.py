"""gpt_oss_20b: the shape of gpt-oss-20b, 24 layers x 32 experts, top-4, made-up weights.

In bfloat16, where the original stores its experts in MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residency.runtime.models.made_up import MadeUp


class GptOss20b(MadeUp):
    """An expert is 49.8 MB in bfloat16, all are 38 GB. Windowed and full attention alternate."""

    model_type: ClassVar[str] = "gpt_oss"
    sizes: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
