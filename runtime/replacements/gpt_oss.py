"""gpt-oss: attention whose decode step is the same for every token, so that a graph can hold it.

transformers' sliding-window cache counts its tokens in Python and its masks are made from Python
numbers. Here positions and masks come from the cache's own position tensor, and a sliding layer's
keys and values are a ring: the token at position p lies in place p mod R. Sinks, projections and
rotary embedding are as transformers writes them. Query heads that share a key head are multiplied
together, so keys and values are not repeated.

Shapes: B sequences of S tokens, N key heads, G query heads for each, D head dimension, R places of
a ring, L places or tokens attended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, apply_rotary_pos_emb

from residency.runtime.replacements.seam import Seam


def replace(model: PreTrainedModel, seam: Seam) -> list[str]:
    """Bind the attention of every layer to the form above; what was replaced."""
    body: Any = model.get_decoder()
    attentions = [layer.self_attn for layer in body.layers]
    if any(type(attention) is not GptOssAttention for attention in attentions):
        return []
    positions = Positions(attentions, seam)
    for attention in attentions:
        attention.forward = RingAttention(attention, positions).forward
    body.register_forward_pre_hook(positions.enter, with_kwargs=True)
    return [
        f"GptOssAttention x {len(attentions)}: positions and masks from the cache's tensors",
        "GptOssModel: no attention mask is built",
    ]


@dataclass(frozen=True)
class Pass:
    """Where S tokens are kept, and what each may attend to.

    places_S: in a full layer, which are the tokens' positions. end: places of it that are read.
    full_SL: bool, over those places. ring_places_K: in a ring, of the last K tokens.
    sliding_SL: bool, over the ring; behind it, for more than one token, the tokens themselves.
    """

    places_S: Tensor
    end: int
    full_SL: Tensor
    ring_places_K: Tensor | None = None
    sliding_SL: Tensor | None = None


class Positions:
    """The pass in flight, shared by the layers."""

    def __init__(self, attentions: list[Any], seam: Seam) -> None:
        self._attentions = attentions
        self._seam = seam
        self.current: Pass | None = None

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepares the pass; gives the model its positions, so that it asks the cache for none."""
        if len(args) > 1 or kwargs.get("attention_mask") is not None:
            raise ValueError(
                "the replaced GptOssModel takes no attention_mask: its sequences have one length "
                "and no padding"
            )
        given = args[0] if args else kwargs.get("input_ids")
        batch, steps = (kwargs["inputs_embeds"] if given is None else given).shape[:2]
        entries = self._entries(kwargs.get("cache"), batch)
        begin = entries[0].cumulative_length
        positions_S = begin + torch.arange(steps, device=begin.device)
        self.current = self._pass(entries, positions_S, begin)
        torch._foreach_add_([entry.cumulative_length for entry in entries], steps)
        made = {"full_attention": None, "sliding_attention": None}
        return args, {**kwargs, "attention_mask": made, "position_ids": positions_S[None]}

    def _entries(self, cache: Any, batch: int) -> list[Any]:
        """The layers of the cache, their tensors made if they were not yet."""
        entries = list(cache.layers) if cache is not None else []
        if not entries or not all(isinstance(entry, StaticLayer) for entry in entries):
            raise TypeError("the replaced GptOssModel needs a StaticCache")
        for attention, entry in zip(self._attentions, entries, strict=True):
            if not entry.is_initialized:
                heads = attention.config.num_key_value_heads
                like = attention.k_proj.weight.new_empty(())
                states = like.expand(batch, heads, 1, attention.head_dim)
                entry.lazy_initialization(states, states)
        return entries

    def _pass(self, entries: list[Any], positions_S: Tensor, begin: Tensor) -> Pass:
        sliding = [isinstance(entry, StaticSlidingWindowLayer) for entry in entries]
        lengths = [entry.max_cache_len for entry in entries]
        rings = {n for n, slides in zip(lengths, sliding, strict=True) if slides}
        full = {n for n, slides in zip(lengths, sliding, strict=True) if not slides} or {0}
        assert len(rings) < 2 and len(full) == 1, "one window and one capacity for all layers"
        steps, device, capacity = len(positions_S), begin.device, full.pop()
        # A graph may hold a step of one token: it reads all places, whatever the position.
        end = capacity if steps == 1 else min(capacity, self._seam.position_of() + steps)
        q_S1 = positions_S[:, None]
        full_SL = torch.arange(end, device=device) <= q_S1
        if not rings:
            return Pass(positions_S, end, full_SL)
        ring = rings.pop()
        ring_places_K = positions_S[-ring:] % ring
        ring_R = torch.arange(ring, device=device)
        if steps == 1:  # the token is in the ring already, and took the place of the one too old
            return Pass(positions_S, end, full_SL, ring_places_K, ring_R <= q_S1)
        held_R = begin - 1 - (begin - 1 - ring_R) % ring  # the position in each place
        kv_L = torch.cat([held_R, positions_S])
        sliding_SL = (kv_L <= q_S1) & (kv_L > q_S1 - ring) & (kv_L >= 0)
        return Pass(positions_S, end, full_SL, ring_places_K, sliding_SL)


class RingAttention:
    """Stands for one GptOssAttention's forward, with its parameters."""

    def __init__(self, attention: Any, positions: Positions) -> None:
        self._attention = attention
        self._positions = positions

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, S, H], and no weights."""
        attention = self._attention
        batch, steps, _ = hidden_states.shape
        shape = (batch, steps, -1, attention.head_dim)
        q, k, v = (
            getattr(attention, f"{name}_proj")(hidden_states).view(shape).transpose(1, 2)
            for name in "qkv"
        )
        q_BHSD, k_BNSD = apply_rotary_pos_emb(q, k, *position_embeddings)
        current = self._positions.current
        assert current is not None, "the model's hook runs before its layers"
        entry = cache.layers[attention.layer_idx]
        if isinstance(entry, StaticSlidingWindowLayer):
            keys, values = _through_ring(entry, k_BNSD, v, current.ring_places_K)
            mask_SL = current.sliding_SL
        else:
            entry.keys.index_copy_(2, current.places_S, k_BNSD)
            entry.values.index_copy_(2, current.places_S, v)
            keys, values = entry.keys[:, :, : current.end], entry.values[:, :, : current.end]
            mask_SL = current.full_SL
        assert mask_SL is not None, "made wherever a layer slides"
        out = _attend_with_sinks(q_BHSD, keys, values, mask_SL, attention)
        joined: Tensor = attention.o_proj(out.transpose(1, 2).reshape(batch, steps, -1))
        return joined, None


def _through_ring(
    entry: Any, k_BNSD: Tensor, v_BNSD: Tensor, places_K: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keep the last K of S tokens; what the S may attend to: the ring, for more than one token as
    it was before, with the S tokens behind it.
    """
    assert places_K is not None, "made wherever a layer slides"
    kept = len(places_K)
    seen = (entry.keys, entry.values)
    if k_BNSD.shape[2] > 1:
        seen = (torch.cat([entry.keys, k_BNSD], 2), torch.cat([entry.values, v_BNSD], 2))
    entry.keys.index_copy_(2, places_K, k_BNSD[:, :, -kept:])
    entry.values.index_copy_(2, places_K, v_BNSD[:, :, -kept:])
    return seen


def _attend_with_sinks(
    q_BHSD: Tensor, keys_BNLD: Tensor, values_BNLD: Tensor, mask_SL: Tensor, attention: Any
) -> Tensor:
    """[B, H, S, D]: a softmax over the keys seen and one logit more a head, its sink.

    Scores lie in memory twice at most, for they are what a long chunk takes most of.
    """
    batch, heads, steps, dim = q_BHSD.shape
    kv_heads = keys_BNLD.shape[1]
    q_BNRD = q_BHSD.reshape(batch, kv_heads, -1, dim)  # R = G * S rows
    logits_BNRL = torch.matmul(q_BNRD, keys_BNLD.transpose(2, 3)).mul_(attention.scaling)
    shape = logits_BNRL.shape
    logits_BHSL = logits_BNRL.view(batch, heads, steps, -1)
    logits_BHSL.masked_fill_(~mask_SL, torch.finfo(logits_BHSL.dtype).min)
    sinks = attention.sinks.view(1, -1, 1, 1).expand(batch, heads, steps, 1)
    joined = torch.cat([logits_BHSL, sinks], dim=-1)
    del logits_BNRL, logits_BHSL
    joined.sub_(joined.amax(dim=-1, keepdim=True))
    probabilities = F.softmax(joined, dim=-1)
    del joined
    weights_BNRL = probabilities[..., :-1].reshape(shape)
    del probabilities
    return torch.matmul(weights_BNRL, values_BNLD).view(batch, heads, steps, dim)
