"""Qwen4's static cache: what its replaced layers keep between steps, in transformers' own entries.

Layers of attention keep keys, values and the position, and the indexer's keys where the capacity is
above its budget. Layers of linear attention keep a convolution's last inputs and the state of the
delta rule; with n-gram embeddings, the inputs of their convolution and the last token ids as well.
Zeros are the start of every state, as `reset` leaves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer, StaticIndexedLayer

from residency.runtime.kernels.indexed_rotary import Angles, IndexedCache

CONV, LEXICAL_CONV, CONTEXT = range(3)  # transformers' numbers of convolution states


class Cache:
    """A StaticCache of one model, all tensors made at its first use, and one position for all.

    `sparse`: whether keys can be dropped at all at this capacity.
    """

    def __init__(self, entries: list[Any], config: Any, inv_freq: Tensor, like: Tensor) -> None:
        """Raises TypeError for entries that are not of a StaticCache of this model type."""
        self._entries = entries
        self._indexed = [e for e in entries if not isinstance(e, LinearAttentionLayer)]
        for entry in self._indexed:
            if type(entry) is not StaticIndexedLayer:
                raise TypeError(
                    f"a replaced Qwen4 model needs a StaticCache, not one of {type(entry).__name__}"
                )
        self.capacity: int = self._indexed[0].max_cache_len
        self.block: int = config.indexer_compress_ratio
        # A token sees itself and those before it, so at most so many blocks are complete.
        self.sparse = self.capacity // self.block > config.indexer_budget // self.block
        turns = torch.outer(
            torch.arange(self.capacity, device=like.device).float(),
            inv_freq.float().to(like.device),
        ).repeat(1, 2)
        self.angles = Angles(turns.cos().to(like.dtype), turns.sin().to(like.dtype))
        batch = len(like)
        for entry in self._indexed:
            self._begin_indexed(entry, config, like, batch)
        self.positions = [entry.cumulative_length for entry in self._indexed]

    @property
    def position(self) -> Tensor:
        """int64 []: tokens in the cache before this step."""
        first: Tensor = self.positions[0]
        return first

    def advance(self, steps: int) -> None:
        torch._foreach_add_(self.positions, steps)

    def indexed(self, layer: int) -> IndexedCache:
        entry = self._entries[layer]
        return IndexedCache(entry.keys, entry.values, entry.indexer_keys, entry.index_blocks)

    def conv(self, layer: int, number: int, like_shape: tuple[int, ...], like: Tensor) -> Tensor:
        """State `number` of a layer, made of zeros if it is not there yet."""
        entry = self._entries[layer]
        if not entry.is_conv_states_initialized[number]:
            entry.lazy_initialization(
                conv_states=torch.zeros(like_shape, dtype=like.dtype, device=like.device),
                state_idx=number,
            )
        state: Tensor = entry.conv_states[number]
        return state

    def recurrent(self, layer: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        entry = self._entries[layer]
        if not entry.is_recurrent_states_initialized[0]:
            entry.lazy_initialization(recurrent_states=torch.zeros(shape, device=device))
        state: Tensor = entry.recurrent_states[0]
        return state

    def _begin_indexed(self, entry: Any, config: Any, like: Tensor, batch: int) -> None:
        heads, dim = config.num_key_value_heads, config.head_dim
        states = like.new_empty(()).expand(batch, heads, 1, dim)
        entry.lazy_initialization(states, states)
        entry.index_blocks = None
        if self.sparse:
            width = config.indexer_head_dim
            entry.lazy_initialization_indexer(like.new_empty(()).expand(batch, 1, width))
            blocks = self.capacity // self.block
            entry.index_blocks = like.new_zeros(batch, blocks, width)


def cache_of(cache: Any, config: Any, inv_freq: Tensor, like: Tensor) -> Cache:
    """What stands behind a StaticCache; made on its first use, so before a graph is captured.

    like: [B, ...] in the model's dtype on its device.
    """
    layers = getattr(cache, "layers", None)
    if not layers:
        raise TypeError("a replaced Qwen4 model needs a StaticCache")
    found = getattr(cache, "residency", None)
    if found is None:
        found = cache.residency = Cache(layers, config, inv_freq, like)
    kept: Cache = found
    return kept
