"""What a sequence keeps on the device: the static cache's tensors, layer by layer, in bytes.

Attention keeps keys and values of each token (a sliding window only its own length), latent
attention one latent and one rotated key, an indexer one more key; linear attention keeps a state
whose size does not grow. What can be cut back to fewer tokens needs no snapshot to go back.
"""

from __future__ import annotations

from typing import Any

from transformers import StaticCache
from transformers.cache_utils import (
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)

CAPACITY_STEP = 256  # few capacities, so that graphs are reused
_STATE = 4  # bytes: recurrent states are float32 in every model
_INTEGER = 8  # bytes: kept token ids and positions


def cache_bytes(config: Any, num_tokens: int, element: int) -> int:
    """Of one sequence of `num_tokens`. element: bytes of one of the model's numbers."""
    layers = StaticCache(config=config, max_cache_len=num_tokens).layers
    return sum(_layer_bytes(config, *pair, element) for pair in enumerate(layers))


def snapshot_bytes(config: Any, num_tokens: int, element: int) -> int:
    """Of one snapshot: those layers of a sequence of `num_tokens` that cannot be cut back."""
    layers = StaticCache(config=config, max_cache_len=capacity_for(num_tokens)).layers
    kept = [pair for pair in enumerate(layers) if not can_cut(pair[1])]
    return sum(_layer_bytes(config, *pair, element) for pair in kept)


def capacity_for(num_tokens: int) -> int:
    """Tokens that a sequence has room for where so many are asked for."""
    return -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP


def can_cut(layer: Any) -> bool:
    """Whether a layer of a static cache can go back to fewer tokens by forgetting the newest.

    A window that is shorter than the sequence has dropped its oldest ones, and a recurrent state
    is the sum of all.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False
    if isinstance(layer, StaticSlidingWindowLayer):
        return bool(layer.is_croppable)
    return isinstance(layer, StaticLayer)


def _layer_bytes(config: Any, index: int, layer: Any, element: int) -> int:
    text = config.get_text_config(decoder=True)
    total = 0
    if isinstance(layer, StaticLayer):
        total += layer.max_cache_len * _token_bytes(text, layer, element)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        total += _state_bytes(text, index, element)
    return int(total)


def _token_bytes(text: Any, layer: Any, element: int) -> int:
    """Of one token in one attention layer."""
    if getattr(text, "kv_lora_rank", None):
        width = text.kv_lora_rank + text.qk_rope_head_dim
    else:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        width = 2 * heads * head_dim
    if not hasattr(layer, "indexer_keys"):
        return int(width * element)
    return int((width + text.indexer_head_dim) * element + 3 * _INTEGER)


def _state_bytes(text: Any, index: int, element: int) -> int:
    """Of one linear attention layer: its convolutions' last inputs and its recurrent state."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    state = (2 * keys + values) * text.linear_conv_kernel_dim * element
    state += text.linear_key_head_dim * values * _STATE
    if index + 1 in getattr(text, "ple_layer_ids", ()):  # counted from one
        channels = text.hc_count * text.hidden_size
        state += channels * (text.ple_conv_kernel_size - 1) * text.ngram_size * element
        state += (text.ngram_size - 1) * _INTEGER
    return int(state)
