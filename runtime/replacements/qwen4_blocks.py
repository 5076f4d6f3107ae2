"""Qwen4's blocks between the hyper-connections, by kernels: attention of both kinds, and n-grams.

Every block takes and gives [B, S, H] over its part of the cache, without a host sync. One token
goes through few-row products, longer steps through matrix multiplications.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from residency.runtime.kernels.dense import FEW, launch_linear_few
from residency.runtime.kernels.gated_delta import DeltaHeads, launch_delta_step
from residency.runtime.kernels.gated_delta_chunk import launch_delta_chunk
from residency.runtime.kernels.indexed_rotary import IndexedHeads, Queries, launch_prepare
from residency.runtime.kernels.indexer import queries_at_once, select_few, select_mask
from residency.runtime.kernels.lexical import Gate, launch_gate_values
from residency.runtime.kernels.rotary import KeyValues
from residency.runtime.kernels.selected_attention import (
    gated,
    launch_attend_chunk,
    launch_attend_step,
)
from residency.runtime.kernels.short_conv import launch_short_conv
from residency.runtime.replacements.joined import join
from residency.runtime.replacements.qwen4_cache import CONTEXT, CONV, LEXICAL_CONV, Cache
from residency.runtime.replacements.static_cache import causal_attention


def linear(x_BSC: Tensor, weight_NC: Tensor) -> Tensor:
    """x @ weight^T, [B, S, N]."""
    batch, steps, width = x_BSC.shape
    if batch * steps > FEW:
        return F.linear(x_BSC, weight_NC)
    x_RC = x_BSC.reshape(batch * steps, width)
    return launch_linear_few(x_RC, weight_NC).view(batch, steps, -1)


class LinearAttention:
    """The gated delta rule; the projections' weights become views of one."""

    def __init__(self, module: Any, layer: int) -> None:
        self._layer = layer
        self._in_WH = join(
            [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
        )
        self._out_HV = module.out_proj.weight
        self._taps_CK = module.conv1d.weight.data[:, 0].contiguous()
        self._heads = DeltaHeads(
            module.num_k_heads,
            module.num_v_heads,
            module.head_k_dim,
            module.head_v_dim,
            module.A_log.data,
            module.dt_bias.data,
            module.norm.weight.data,
            module.norm.variance_epsilon,
            module.norm.activation == "silu",
        )

    def __call__(self, x_BSH: Tensor, cache: Cache) -> Tensor:
        heads, (batch, steps, _) = self._heads, x_BSH.shape
        row_BSW = linear(x_BSH, self._in_WH)
        raw, gates = row_BSW[..., : heads.width], row_BSW[..., heads.width :]
        conv = cache.conv(self._layer, CONV, (batch, heads.width, self._taps_CK.shape[1]), x_BSH)
        mixed = launch_short_conv(raw, conv, self._taps_CK)
        shape = (batch, heads.num_values, heads.key_dim, heads.value_dim)
        state = cache.recurrent(self._layer, shape, x_BSH.device)
        rule = launch_delta_step if steps == 1 else launch_delta_chunk
        return linear(rule(mixed, gates, state, heads), self._out_HV)


class IndexedAttention:
    """Attention over the keys that the indexer selects; all are, below its budget."""

    def __init__(self, module: Any, layer: int) -> None:
        self._layer = layer
        indexer = module.indexer
        self._in_WH = join([module.q_proj, module.k_proj, module.v_proj, indexer.index_qk_proj])
        self._out_HA = module.o_proj.weight
        self._budget: int = indexer.block_topk
        self._heads = IndexedHeads(
            module.config.num_attention_heads,
            module.config.num_key_value_heads,
            module.head_dim,
            indexer.index_n_heads,
            indexer.index_head_dim,
            indexer.compress_ratio,
            module.q_norm.weight.data,
            module.k_norm.weight.data,
            indexer.q_layernorm.weight.data,
            indexer.k_layernorm.weight.data,
            module.q_norm.eps,
        )

    def __call__(self, x_BSH: Tensor, cache: Cache, begin: int) -> Tensor:
        """begin: the cache's position as the host knows it; not read where S is one."""
        heads = self._heads
        kept = cache.indexed(self._layer)
        row_BSW = linear(x_BSH, self._in_WH)
        queries = launch_prepare(row_BSW, heads, cache.angles, kept, cache.position)
        both = KeyValues(kept.keys, kept.values)
        if x_BSH.shape[1] == 1:
            selected = None
            if kept.blocks is not None:
                selected = select_few(
                    queries.indexer, kept.blocks, cache.position, heads.block, self._budget
                )
            out = launch_attend_step(
                queries.attention, row_BSW, both, cache.position, heads.block, selected
            )
        else:
            out = gated(self._attend_chunk(queries, both, kept.blocks, begin), row_BSW)
        return linear(out, self._out_HA)

    def _attend_chunk(
        self, queries: Queries, both: KeyValues, blocks: Tensor | None, begin: int
    ) -> Tensor:
        q_BSND = queries.attention
        batch, steps, _, _ = q_BSND.shape
        complete = (begin + steps) // self._heads.block
        if blocks is None or complete <= self._budget:
            return causal_attention(q_BSND.transpose(1, 2), both, begin).transpose(1, 2)
        parts = []
        at_once = queries_at_once(batch, self._heads.num_index, complete)
        for first in range(0, steps, at_once):
            some = slice(first, first + at_once)
            mask = select_mask(
                queries.indexer[:, some],
                blocks[:, :complete],
                begin + first,
                self._heads.block,
                self._budget,
            )
            parts.append(
                launch_attend_chunk(q_BSND[:, some], both, begin + first, self._heads.block, mask)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Lexical:
    """What hashed n-grams add to the streams; the last token ids are part of the cache.

    ids are kept less the end of text's, so that zeros stand for it.
    """

    def __init__(self, module: Any, layer: int) -> None:
        self._layer = layer
        self._embedding = module.ple_embedding
        self._key_value_WE = join([module.key_proj, module.value_proj])
        self._taps_CK = module.conv1d.weight.data[:, 0].contiguous()
        self._dilation: int = module.conv1d.dilation[0]
        norms = (module.norm_key, module.norm_query, module.norm_conv)
        key_C, query_C, conv_C = (norm.weight.data for norm in norms)
        self._gate = Gate(module.hc_count, key_C, query_C, conv_C, module.norm_key.eps)

    def __call__(self, streams_RC: Tensor, ids_BS: Tensor, cache: Cache) -> Tensor:
        """The streams with what the n-grams add, [R, S * H]."""
        batch, steps = ids_BS.shape
        rows = self._embedding.ngram_embedding(self._ids(ids_BS, cache))
        row_BSW = linear(rows.flatten(-2), self._key_value_WE)
        values = launch_gate_values(row_BSW.flatten(0, 1), streams_RC, self._gate)
        size = streams_RC.shape[1]
        length = (self._taps_CK.shape[1] - 1) * self._dilation
        state = cache.conv(self._layer, LEXICAL_CONV, (batch, size, length), streams_RC)
        near = launch_short_conv(
            values.normed_RC.view(batch, steps, size), state, self._taps_CK, self._dilation
        )
        return streams_RC + (values.value_RC + near.view(-1, size))

    def _ids(self, ids_BS: Tensor, cache: Cache) -> Tensor:
        """int64 [B, S, heads]: rows of the table, as `Qwen4ExpTextNGramEmbedding` hashes them."""
        own, end = self._embedding, self._embedding.eos_token_id
        batch, steps = ids_BS.shape
        context = cache.conv(self._layer, CONTEXT, (batch, own.context_len), ids_BS)
        seen = torch.cat([context + end, ids_BS], dim=1)
        context.copy_(seen[:, -own.context_len :] - end)
        return ngram_ids(seen, steps, own)


def ngram_ids(seen: Tensor, steps: int, own: Any) -> Tensor:
    """Of the last `steps` of the tokens seen, int64 [B, steps, heads]; `own`: the n-gram module.

    A token before an end of text does not count: the end of text stands for it.
    """
    multipliers, end = own.layer_multipliers, own.eos_token_id
    size = seen.shape[1]
    token = seen[:, size - steps :]
    mixed = token * multipliers[0]
    inside = torch.ones_like(token, dtype=torch.bool)
    ids = []
    for back in range(1, own.ngram_size):
        earlier = seen[:, size - steps - back : size - back]
        mixed = mixed ^ (torch.where(inside, earlier, end) * multipliers[back])
        inside = inside & (earlier != end)
        heads = slice((back - 1) * own.heads_per_ngram, back * own.heads_per_ngram)
        sizes, offsets = own.ngram_heads_vocab_sizes[heads], own.ngram_heads_offsets[heads]
        ids.append(torch.remainder(mixed[..., None], sizes) + offsets)
    return torch.cat(ids, dim=-1)
