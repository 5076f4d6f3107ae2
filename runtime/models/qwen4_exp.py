"""qwen4_exp: the shape of Qwen3.8-Flash-Next, 48 layers x 512 experts, top-10, made-up weights.

Three of four layers are linear attention, one attends to keys that an indexer selects; the second
layer reads hashed n-grams from a table of 320,001,536 rows, which is cut here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from residency.policies.base import Conflict
from residency.runtime.models.made_up import MadeUp

LEAST_LAYERS = 4  # up to the first layer of attention, whose cache holds the position


class Qwen4Exp(MadeUp):
    """An expert is 2.76 MB in its own nvfp4, 9.8 MB in bfloat16: mind `layers`. The text model
    alone.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(MadeUp.Config):
        """table_rows: rows of 320 bytes that the n-gram table is cut to, hashed ids being taken
        modulo them; 0 keeps all 95 GiB.
        """

        table_rows: int = 6710887

    config: Config
    model_type: ClassVar[str] = "qwen4_exp_text"
    own_format: ClassVar[str] = "nvfp4"
    sizes: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 48,
        "hidden_size": 2560,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "output_gate_type": "sigmoid",
        "hc_count": 4,
        "hc_lowrank": 320,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20000000,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "norm_topk_prob": True,
        "vocab_size": 248320,
        "eos_token_id": 1,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }

    @property
    def table_rows(self) -> int:
        return self.config.table_rows

    def notes(self) -> list[str]:
        (table,) = self.architecture.tables
        size = table.num_elements * self.architecture.dtype.itemsize / 2**30
        cut = f"n-gram table: made up, {table.num_rows} of {table.num_ids} rows ({size:.2f} GiB)"
        return [*super().notes(), cut]

    def faults(self) -> Iterator[Conflict]:
        if 0 < self.config.layers < LEAST_LAYERS:
            reason = f"its first layer of attention is the {LEAST_LAYERS}th"
            key = f"model.layers={self.config.layers}"
            yield Conflict((key,), reason, f"model.layers={LEAST_LAYERS}")
            return
        if self.config.table_rows < 0:
            key = f"model.table_rows={self.config.table_rows}"
            yield Conflict((key,), "it is a number of rows (0: all)", "model.table_rows=0")
            return
        yield from super().faults()
