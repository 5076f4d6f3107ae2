"""A layer's static cache, and the causal attention of a chunk over it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers.cache_utils import StaticLayer

from residency.runtime.kernels.rotary import KeyValues


def entry_of(cache: Any, index: int, like: Tensor, batch: int, attention: Any) -> Any:
    """Layer `index` of the cache, its tensors made in `like`'s dtype if they were not yet."""
    entry: Any = cache.layers[index] if cache is not None else None
    if type(entry) is not StaticLayer:
        raise TypeError(
            f"a replaced {type(attention).__name__} needs a StaticCache, not "
            f"{type(cache).__name__} with {type(entry).__name__}"
        )
    if not entry.is_initialized:
        heads = attention.config.num_key_value_heads
        states = like.new_empty(()).expand(batch, heads, 1, attention.head_dim)
        entry.lazy_initialization(states, states)
    return entry


def causal_attention(q_BHSD: Tensor, kept: KeyValues, begin: int) -> Tensor:
    """[B, heads, S, D]: attention of S tokens that were stored behind the first `begin` ones."""
    steps, end = q_BHSD.shape[2], begin + q_BHSD.shape[2]
    keys, values = kept.keys[:, :, :end], kept.values[:, :, :end]
    mask: Any = None
    if begin > 0 and q_BHSD.is_cuda and q_BHSD.dtype != torch.float32:
        mask = causal_lower_right(steps, end)
    elif begin > 0:
        mask = torch.ones(steps, end, dtype=torch.bool, device=q_BHSD.device).tril(begin)
    return F.scaled_dot_product_attention(
        q_BHSD, keys, values, attn_mask=mask, is_causal=begin == 0, enable_gqa=True
    )
