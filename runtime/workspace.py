"""Workspace: what a step takes beside weights, rows and caches, in bytes, from the config alone.

A layer's parts follow one another, so the largest of them counts, beside what lives through all of
them: residuals, the mask, the logits. The terms are those of transformers' own forms, of which some
are wider than a kernel's (scores of attention that is written out, the delta rule in chunks); so it
is an upper bound also where kernels stand for them. docs/memory.md tells how it was checked.

Legend: T tokens of the step, C places of the cache, H hidden, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from residency.policies.step import IdSpace
from residency.runtime.cache_sizes import capacity_for

_FLOAT = 4  # bytes: softmax and recurrences are computed in float32
_WIDE = 8  # bytes: ids, and complex rotations
_DELTA_CHUNK = 64  # tokens that the delta rule works on at once
_QUERIES = ((768, 256), (192, 64), (0, 32))  # torch's blocks of queries, from so many tokens up
_KEYS = 512  # torch's blocks of keys
_PIECE = 32 << 10  # bytes: what is small and grows with nothing, as routes of a few tokens


@dataclass(frozen=True)
class Workspace:
    """Of one model. element: bytes of one of its numbers. shapes: of one expert's tensors.

    written_out: whether attention's scores lie in memory whole, as its eager form has them.
    """

    config: Any
    space: IdSpace
    element: int
    shapes: Mapping[str, tuple[int, ...]]
    written_out: bool

    def num_bytes(
        self, num_tokens: int, context: int, rows: int = 1, *, on_gpu: bool = False
    ) -> int:
        """Of a step over `num_tokens` in each of `rows` sequences of up to `context` tokens.

        on_gpu: where torch has attention for heads of two widths, and no copies for its products.
        """
        text, places = self.config.get_text_config(decoder=True), capacity_for(context)
        tokens = num_tokens * rows
        parts = [
            self._attention(text, num_tokens, places, on_gpu) * rows,
            self._recurrence(text, tokens) if _is_linear(text) else 0,
            self._experts(text, tokens),
            self._dense(text, tokens),
        ]
        streams = getattr(text, "hc_count", 1)  # residual streams side by side
        lasting = tokens * text.hidden_size * (2 + 2 * streams) * self.element
        lasting += tokens * (2 * _head_dim(text) * self.element + 2 * _WIDE)  # rotations, positions
        logits = rows * text.vocab_size * (self.element + 2 * _FLOAT + _WIDE)
        mask = self._mask(text, num_tokens, places) * rows
        return int(lasting + mask + max(*parts, logits) + _PIECE)

    def _mask(self, text: Any, tokens: int, places: int) -> int:
        """One for each kind of attention: bool, or added to the scores."""
        window = min(getattr(text, "sliding_window", None) or 0, places)
        kinds = set(getattr(text, "layer_types", None) or ())
        widths = [places] + ([window + tokens] if "sliding_attention" in kinds else [])
        if hasattr(text, "indexer_budget"):  # a choice of places, and both as one
            widths += [places, places]
        return int(tokens * sum(widths) * (self.element if self.written_out else 1))

    def _attention(self, text: Any, tokens: int, places: int, on_gpu: bool) -> int:
        """Projections, keys and values of all heads, scores where they lie in memory."""
        heads, element = text.num_attention_heads, self.element
        groups: int = heads // (getattr(text, "num_key_value_heads", None) or heads)
        latent = getattr(text, "kv_lora_rank", None)
        if latent:
            key, value = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
            kept = places * (heads * (text.qk_nope_head_dim + value + key) + latent) * element
        else:
            key = value = _head_dim(text)
            # One token's queries are grouped by their keys instead; the eager form does not.
            repeated = groups > 1 and (tokens > 1 or self.written_out)
            kept = places * heads * 2 * key * element if repeated else 0
        if hasattr(text, "indexer_head_dim"):  # keys of all places, gathered and pooled
            kept += places * text.indexer_head_dim * (2 * element + _FLOAT)
        per_token = heads * (3 * key + value) + 2 * heads * (key + value) // groups
        own = kept + tokens * per_token * element
        if self.written_out:
            copied = places * heads * key * element
            return int(own + copied + heads * tokens * (places + 1) * (2 * element + _FLOAT))
        if key == value or on_gpu:
            own += tokens * places * element  # the mask as it is added
            if on_gpu and groups > 1 and element == _FLOAT:
                # No fused attention takes these: scores and their softmax, and the mask twice.
                own += 2 * (heads + 1) * tokens * places * _FLOAT
            return int(own + (0 if on_gpu else self._blocks(heads, key, tokens, places)))
        scores = 2 * heads * tokens * places + tokens * places  # and the mask
        copied = heads * (places + tokens) * (2 * key + value)
        return int(own + (scores + copied) * _FLOAT)

    def _blocks(self, heads: int, width: int, tokens: int, places: int) -> int:
        """The CPU's fused attention: blocks of scores for each thread; keys and values packed for
        products of short numbers.
        """
        block = next(size for least, size in _QUERIES if tokens >= least)
        short = self.element if self.element < _FLOAT else 0
        each = min(block, tokens) * (min(_KEYS, places) + width + 2) * (_FLOAT + short)
        return torch.get_num_threads() * each + places * heads * 2 * width * short

    def _recurrence(self, text: Any, tokens: int) -> int:
        """The gated delta rule over chunks of tokens, in float32, and its projections."""
        heads, key, value = (
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
        )
        keys, values = text.linear_num_key_heads * key, heads * value
        padded = -(-tokens // _DELTA_CHUNK) * _DELTA_CHUNK
        per_token = heads * (3 * _DELTA_CHUNK + 6 * key + 4 * value) * _FLOAT
        projected = (2 * (2 * keys + values) + 2 * values) * self.element
        return int(padded * per_token + tokens * projected + 2 * heads * key * value * _FLOAT)

    def _experts(self, text: Any, tokens: int) -> int:
        """Results of all of a token's experts, and again in order; or one expert's products."""
        hidden, top_k = text.hidden_size, self.space.top_k
        width = math.prod(self.shapes["down_proj"]) // hidden
        results = top_k * hidden
        rest = max(results + 2 * hidden, 2 * hidden + 3 * width, top_k * width)
        routes = self.space.num_experts * _FLOAT * 2 + top_k * (2 * _WIDE + self.element)
        return int(tokens * ((results + rest) * self.element + routes) + self._one_expert())

    def _one_expert(self) -> int:
        """The largest matrix, where it is dequantised for its product."""
        return max(math.prod(shape) for shape in self.shapes.values()) * self.element

    def _dense(self, text: Any, tokens: int) -> int:
        """A dense layer's products, or those of an expert that all tokens share."""
        keys = ("intermediate_size", "shared_expert_intermediate_size")
        widest = max(getattr(text, key, None) or 0 for key in keys)
        return int(tokens * (3 * widest + 2 * text.hidden_size) * self.element)


def _is_linear(text: Any) -> bool:
    return "linear_attention" in (getattr(text, "layer_types", None) or ())


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
