"""The supported architectures as tiny models: every peculiarity of a family in under 1 MB.

Weights are random, from a fixed seed; biases, sinks and router corrections are not left at zero.
"""

from pathlib import Path

import torch

VOCABULARY = 128
BASE = dict(
    hidden_size=64,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    num_experts_per_tok=3,  # the order of two summands would not show
    max_position_embeddings=512,
    initializer_range=0.2,  # large enough that routes and tokens differ
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)
LATENT = dict(  # multi-head latent attention
    num_hidden_layers=4,
    n_routed_experts=8,
    moe_intermediate_size=24,
    intermediate_size=48,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
)
LINEAR = dict(  # three gated delta nets, then attention
    num_hidden_layers=4,
    num_experts=8,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)
CONFIGS = {
    "qwen3_moe": dict(
        num_hidden_layers=4,
        num_experts=8,
        moe_intermediate_size=32,
        head_dim=16,
        decoder_sparse_step=2,  # MoE layers between dense ones
        intermediate_size=48,
    ),
    "qwen2_moe": dict(
        num_hidden_layers=3,
        num_experts=8,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "olmoe": dict(num_hidden_layers=3, num_experts=8),
    "mixtral": dict(num_hidden_layers=3, num_local_experts=8),
    "qwen3_next": LINEAR | dict(mlp_only_layers=[0], intermediate_size=48),
    "qwen3_5_moe": LINEAR,
    "qwen4_exp": LINEAR
    | dict(
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[2],
        ple_embed_dim=32,
        ngram_size=3,
        heads_per_ngram=2,
        ngram_vocab_size_base=64,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=4,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "gpt_oss": dict(
        num_hidden_layers=4,
        num_local_experts=8,
        intermediate_size=24,
        head_dim=16,
        sliding_window=8,
        swiglu_limit=0.5,  # clamps at these sizes
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
    ),
    "deepseek_v2": LATENT | dict(first_k_dense_replace=1, topk_method="group_limited_greedy"),
    "deepseek_v3": LATENT | dict(first_k_dense_replace=2),
    "glm4_moe": dict(
        num_hidden_layers=4,
        n_routed_experts=8,
        moe_intermediate_size=32,
        intermediate_size=48,
        head_dim=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "minimax_m2": dict(num_hidden_layers=3, num_local_experts=8, head_dim=16),
}
WRAPPED = ("qwen3_5_moe", "qwen4_exp")  # a text model within a multimodal config
VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    patch_size=2,
    out_hidden_size=64,
    num_position_embeddings=4,
)


def config_of(model_type: str, **changes):
    from transformers import AutoConfig

    sizes = BASE | CONFIGS[model_type] | changes
    if model_type not in WRAPPED:
        return AutoConfig.for_model(model_type, **sizes)
    text = dict(model_type=f"{model_type}_text", **sizes)
    return AutoConfig.for_model(model_type, text_config=text, vision_config=VISION)


def write(folder: Path, model_type: str, **changes) -> Path:
    """A random model of `model_type`, written by transformers' save_pretrained in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if model_type in WRAPPED else AutoModelForCausalLM
    model = auto.from_config(config_of(model_type, **changes))
    fill(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def fill(model) -> None:
    """Values other than 0 and 1 where transformers starts with those: norms, biases, sinks."""
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() > 1 and tensor.unique().numel() == 1:
            assert "inv_freq" not in name
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
