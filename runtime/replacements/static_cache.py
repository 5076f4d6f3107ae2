"""A layer's static cache, the causal attention of a chunk over it, and the scratch of a step's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers.cache_utils import StaticLayer

from residency.runtime.batch_cache import AttentionRows
from residency.runtime.kernels.attention import Scratch
from residency.runtime.kernels.rotary import KeyValues


def entry_of(cache: Any, index: int, like: Tensor, batch: int, attention: Any) -> Any:
    """Layer `index` of the cache, its tensors made in `like`'s dtype if they were not yet.

    One length for all sequences (StaticLayer), or one for each (AttentionRows).
    """
    entry: Any = cache.layers[index] if cache is not None else None
    if type(entry) not in (StaticLayer, AttentionRows):
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


class Workspace:
    """Decode attention's scratch, shared by the layers, which follow one another.

    Each number of sequences keeps its own: captured graphs hold its address.
    """

    def __init__(self) -> None:
        self._arrivals: Tensor | None = None
        self._scratches: dict[int, Scratch] = {}

    def arrivals(self, device: torch.device) -> Tensor:
        if self._arrivals is None:
            self._arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        return self._arrivals

    def scratch(self, batch: int, num_heads: int, cache: KeyValues) -> Scratch:
        """Made on the first step of so many sequences, so warm up before capturing a graph."""
        if batch not in self._scratches:
            self._scratches[batch] = Scratch.empty(batch, num_heads, cache)
        return self._scratches[batch]
