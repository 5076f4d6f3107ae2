"""The demo model, and the form in which it is trained.

The model is an ordinary `Qwen3MoeForCausalLM`. A mixture of experts picks a few small feed-forward
networks for every token, which is awkward to train fast: tokens have to be sorted by expert. For a
model this small there is a simpler way. All experts side by side are one wide feed-forward network;
scaling each expert's stretch of the hidden layer by its routing weight, which is zero for experts
that were not chosen, gives the same sum. It costs eight times the arithmetic, but in three large
matrix products a GPU does at full speed, and its gradients are the same ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

DENSE = "dense_training"
LONG_CONTEXT = 16_384
Block = Callable[[Any, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
Head = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]


def dense_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """All experts as one wide network, unchosen ones scaled by zero."""
    count, twice, width = experts.gate_up_proj.shape
    inner = twice // 2
    scale = weights.new_zeros(hidden.shape[0], count).scatter(1, index, weights)
    both = F.linear(hidden, experts.gate_up_proj.view(count * twice, width))
    gate, up = both.view(-1, count, 2, inner).unbind(2)
    active = experts.act_fn(gate) * up * scale[:, :, None]
    down = experts.down_proj.permute(0, 2, 1).reshape(count * inner, width)
    mixed: Tensor = active.flatten(1) @ down.to(active.dtype)
    return mixed.to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(DENSE, dense_experts)


def build(vocabulary: int, end_of_text: int) -> Qwen3MoeForCausalLM:
    """About 9.2 million parameters: 8 layers of 32 experts, 4 for each token."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=160,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=LONG_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        initializer_range=0.04,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    model = Qwen3MoeForCausalLM(config)
    # Each layer adds to the residual stream; smaller output matrices keep its size at the start.
    for layer in model.model.layers:
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj):
            matrix.data.mul_((2 * config.num_hidden_layers) ** -0.5)
    model.set_experts_implementation(DENSE)
    return model


def router_losses(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """How unevenly the whole batch loads the experts (1 is even), and how large the logits are.

    The batch spans all domains, so experts may specialise by domain at no cost.
    """
    logits = logits.float()
    count = logits.shape[-1]
    share = F.one_hot(index, count).float().sum((0, 1)) / index.numel()
    balance = count * (share * logits.softmax(-1).mean(0)).sum()
    return balance, logits.logsumexp(-1).square().mean()


def block(
    layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer with dropout on what it adds; also returns the router's two losses."""
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden),
        position_embeddings=(cos, sin),
        attention_mask=None,
    )
    hidden = hidden + F.dropout(attended, dropout)
    flat = layer.post_attention_layernorm(hidden).flatten(0, 1)
    logits, weights, index = layer.mlp.gate(flat)
    mixed = layer.mlp.experts(flat, index, weights).view_as(hidden)
    return hidden + F.dropout(mixed, dropout), *router_losses(logits, index)


def head(norm: nn.Module, lm_head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = lm_head(norm(hidden))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


class Trainee:
    """Runs the model's own layers one by one, so that a single compiled layer serves all eight."""

    def __init__(self, model: Qwen3MoeForCausalLM, dropout: float, compiled: bool) -> None:
        self.model, self.dropout = model, dropout
        self.block: Block = torch.compile(block, dynamic=False) if compiled else block
        self.head: Head = torch.compile(head, dynamic=False) if compiled else head

    def losses(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean cross-entropy, and the router's balance and size losses averaged over layers."""
        inner = self.model.model
        hidden = inner.embed_tokens(ids)
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = inner.rotary_emb(hidden, position_ids=position)
        balances, sizes = [], []
        for layer in inner.layers:
            hidden, balance, size = self.block(layer, hidden, cos, sin, self.dropout)
            balances.append(balance)
            sizes.append(size)
        loss = self.head(inner.norm, self.model.lm_head, hidden, targets)
        return loss, torch.stack(balances).mean(), torch.stack(sizes).mean()
