"""A tiny Qwen4: the config's keys, for models of random weights and for checkpoints."""

from typing import Any

END = 7  # of text

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "hc_count": 4,
    "hc_lowrank": 12,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 4,
    "indexer_n_heads": 8,  # so that no score is zero, where order among equals would count
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
