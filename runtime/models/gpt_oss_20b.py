"""gpt_oss_20b: the shape of gpt-oss-20b, 24 layers x 32 experts, top-4, made-up weights.

Experts are stored in MXFP4, as they are published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from residency.runtime.models.made_up import MadeUp


class GptOss20b(MadeUp):
    """An expert is 13.2 MB in its own mxfp4, 49.8 MB in bfloat16.

    Windowed and full attention alternate.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(MadeUp.Config):
        """context: most tokens of a sequence; 0 takes all 131,072. Attention keeps every score of a
        chunk: of the longest, that would be half a TB.
        """

        context: int = 8192

    config: Config
    model_type: ClassVar[str] = "gpt_oss"
    own_format: ClassVar[str] = "mxfp4"
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
