"""Qwen4: the whole text model without loops over queries, for chunks and for single tokens.

transformers' form selects keys in Python, query by query, and lets the positions grow by one
concatenation a step. Here both are fixed-shape kernels over a StaticCache, so a step can be
captured. The model takes no attention mask: its sequences have one length and no padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextDecoderLayer,
    Qwen4ExpTextGatedResidual,
)

from residency.runtime.kernels.dense import FEW
from residency.runtime.kernels.hyper import Mixed, Mixer, Streams, launch_mix, settle
from residency.runtime.kernels.routing import launch_choose_experts
from residency.runtime.kernels.shared_expert import launch_shared_expert, shared_expert
from residency.runtime.replacements.joined import join
from residency.runtime.replacements.qwen4_blocks import (
    IndexedAttention,
    Lexical,
    LinearAttention,
    linear,
)
from residency.runtime.replacements.qwen4_cache import Cache, cache_of
from residency.runtime.replacements.seam import Seam

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_TILE = 1 << 16  # elements of the streams that a program can hold


def replace(model: PreTrainedModel, seam: Seam) -> list[str]:
    """Bind a fused forward to the text model; what was replaced."""
    if reason_against(model) is not None:
        return []
    body: Any = model.get_decoder()
    body.forward = FusedModel(body, seam).forward
    kinds = [layer.layer_type for layer in body.layers]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return [
        f"Qwen4ExpTextDecoderLayer x {len(kinds)}: fused kernels, "
        + ", ".join(f"{count} of {kind.replace('_', ' ')}" for kind, count in counts.items()),
        "Qwen4ExpTextModel: static positions, no attention mask is built",
    ]


def reason_against(model: PreTrainedModel) -> str | None:
    """Why the kernels cannot stand for this model; None where they can."""
    config: Any = model.config.get_text_config()
    body: Any = model.get_decoder()
    layers = list(body.layers)
    if any(type(layer) is not Qwen4ExpTextDecoderLayer for layer in layers):
        return "its layers are not Qwen4ExpTextDecoderLayer"
    dims = {
        "head_dim": config.head_dim,
        "indexer_head_dim": config.indexer_head_dim or 0,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
    }
    odd = [f"{name}={dim}" for name, dim in dims.items() if dim & (dim - 1) or dim < 16]
    rope = config.rope_parameters["rope_type"]
    dtypes = {p.dtype for n, p in body.layers.named_parameters() if ".experts." not in n}
    checks = {
        "it has no attention layer": "indexed_attention" not in config.layer_types,
        "it has no indexer": config.indexer_budget is None,
        f"its blocks of {config.indexer_compress_ratio} keys are no power of two up to 16": (
            config.indexer_compress_ratio not in (1, 2, 4, 8, 16)
        ),
        "its attention has biases": config.attention_bias,
        f"its rotary embedding is {rope}": rope != "default",
        f"its head sizes are {', '.join(odd)}": bool(odd),
        "its streams are too wide": config.hidden_size * config.hc_count > _LARGEST_TILE,
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        "its parameters differ in dtype": len(dtypes) != 1,
        f"its dtype is {next(iter(dtypes))}": not dtypes.issubset(_DTYPES),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


class FusedModel:
    """The forward of a Qwen4ExpTextModel."""

    def __init__(self, body: Any, seam: Seam) -> None:
        self._body = body
        self._seam = seam
        self._config: Any = body.config
        self._layers = [FusedLayer(layer, i, seam) for i, layer in enumerate(body.layers)]
        self._last = _mixer(body.hyper_connection_mixer)
        self._inv_freq: Tensor = body.rotary_emb.inv_freq

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """As Qwen4ExpTextModel.forward for token ids [B, S] over a StaticCache."""
        if attention_mask is not None or position_ids is not None or inputs_embeds is not None:
            raise ValueError(
                "the replaced Qwen4ExpTextModel takes token ids alone: no attention_mask, "
                "position_ids or inputs_embeds; its sequences have one length and no padding"
            )
        assert input_ids is not None, "the model was called without token ids"
        x_BSH: Tensor = self._body.embed_tokens(input_ids)
        batch, steps, hidden = x_BSH.shape
        kept = cache_of(cache, self._config, self._inv_freq, x_BSH)
        rows_RC = x_BSH.view(-1, hidden).repeat(1, self._config.hc_count)
        streams = Streams(rows_RC)
        begin = self._seam.position_of()
        for layer in self._layers:
            streams = layer(streams, input_ids, kept, begin)
        kept.advance(steps)
        x_RH = launch_mix(streams, self._last).x_RH
        return MoeModelOutputWithPast(
            last_hidden_state=x_RH.view(batch, steps, hidden), cache=cache
        )


class FusedLayer:
    """One Qwen4ExpTextDecoderLayer over residual streams."""

    def __init__(self, layer: Any, index: int, seam: Seam) -> None:
        self._seam = seam
        self._lexical = None if layer.ple is None else Lexical(layer.ple, index)
        self._attention_mixer = _mixer(layer.attn_hyper_connection)
        self._experts_mixer = _mixer(layer.mlp_hyper_connection)
        self._attention: LinearAttention | IndexedAttention
        if layer.layer_type == "linear_attention":
            self._attention = LinearAttention(layer.linear_attn, index)
        else:
            self._attention = IndexedAttention(layer.self_attn, index)
        mlp, shared = layer.mlp, layer.mlp.shared_expert
        self._experts: Any = mlp.experts
        self._gate: Any = mlp.gate
        self._row_WH = join([mlp.gate, shared.gate_proj, shared.up_proj, mlp.shared_expert_gate])
        self._down_HF: Tensor = shared.down_proj.weight.data

    def __call__(self, streams: Streams, ids_BS: Tensor, cache: Cache, begin: int) -> Streams:
        if self._lexical is not None:
            rows_RC = settle(streams, self._attention_mixer.num_streams)
            streams = Streams(self._lexical(rows_RC, ids_BS, cache))
        mixed = launch_mix(streams, self._attention_mixer)
        x_BSH = mixed.x_RH.view(*ids_BS.shape, -1)
        if isinstance(self._attention, IndexedAttention):
            out_BSH = self._attention(x_BSH, cache, begin)
        else:
            out_BSH = self._attention(x_BSH, cache)
        mixed = launch_mix(_with(mixed, out_BSH.flatten(0, 1)), self._experts_mixer)
        return _with(mixed, self._add_experts(mixed.x_RH))

    def _add_experts(self, x_RH: Tensor) -> Tensor:
        gate = self._gate
        row_RW = linear(x_RH[None], self._row_WH)[0]
        few = len(x_RH) <= FEW
        shared_RH = (launch_shared_expert if few else shared_expert)(row_RW, self._down_HF)
        logits_RE = row_RW[:, : gate.num_experts].contiguous()
        routes = launch_choose_experts(logits_RE, gate.top_k, bool(gate.norm_topk_prob))
        return self._seam.add_experts(
            self._experts, x_RH, routes.ids_TK, routes.weights_TK, shared_RH
        )


def _with(mixed: Mixed, out_RH: Tensor) -> Streams:
    """The streams behind a mixer, its block's output pending."""
    return Streams(mixed.rows_RC, out_RH, mixed.inject_RS)


def _mixer(module: Qwen4ExpTextGatedResidual) -> Mixer:
    down: list[nn.Linear] = [module.input_mix_weight_down]
    if module.block_inject_weight is not None:
        down.append(module.block_inject_weight)
    norm: Any = module.hc_norm
    return Mixer(
        module.hc_count, norm.weight.data, norm.eps, join(down), module.input_mix_weight_up.weight
    )
