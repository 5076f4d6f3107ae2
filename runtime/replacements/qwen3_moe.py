"""Qwen3-MoE: the decoder layer in about six kernels, for chunks and for single tokens.

Short chunks run them as captured pieces, see `pieces`. A replaced layer attends causally over a
StaticCache of sequences of one length, or a token a row over a BatchCache, where each row has its
own. It takes no attention mask, so the model is given none to build, and a caller's is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeSparseMoeBlock,
)

from residency.runtime.kernels.attention import launch_attend_one
from residency.runtime.kernels.dense import (
    FEW,
    Normed,
    launch_add_rms_norm,
    launch_linear_few,
    launch_norm_linear_few,
    launch_rms_norm,
)
from residency.runtime.kernels.rotary import HeadNorms, KeyValues, launch_rotate_and_store
from residency.runtime.kernels.routing import (
    Routed,
    Routes,
    launch_choose_experts,
    launch_route_few,
)
from residency.runtime.replacements.joined import join
from residency.runtime.replacements.pieces import Buffers, Chunk, Pieces, Sizes, covers
from residency.runtime.replacements.seam import Seam
from residency.runtime.replacements.static_cache import Workspace, causal_attention, entry_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_ROW = 16384  # elements of a weight's row that a program can hold


def replace(model: PreTrainedModel, seam: Seam) -> list[str]:
    """Bind fused forwards to the model's decoder layers and final norm; what was replaced."""
    if reason_against(model) is not None:
        return []
    body: Any = model.get_decoder()
    shared = Workspace(), Pieces(_sizes(model))
    for index, layer in enumerate(body.layers):
        layer.forward = FusedLayer(layer, index, seam, *shared).forward
    norm = body.norm
    body.norm.forward = lambda x: launch_rms_norm(x.contiguous(), norm.weight, _eps(norm))
    body.register_forward_pre_hook(_without_mask, with_kwargs=True)
    return [
        f"Qwen3MoeDecoderLayer x {len(body.layers)}: fused kernels",
        "Qwen3MoeModel.norm: one kernel",
        "Qwen3MoeModel: no attention mask is built",
    ]


def reason_against(model: PreTrainedModel) -> str | None:
    """Why the kernels cannot stand for this model's layers; None where they can."""
    config: Any = model.config.get_text_config()
    body: Any = model.get_decoder()
    layers = list(body.layers)
    if any(type(layer) is not Qwen3MoeDecoderLayer for layer in layers):
        return "its layers are not Qwen3MoeDecoderLayer"
    dim: int = layers[0].self_attn.head_dim
    width = config.num_attention_heads * dim
    rope = config.rope_parameters["rope_type"]
    dtypes = {p.dtype for layer in layers for p in _own_parameters(layer)}
    projections = [getattr(layer.self_attn, f"{n}_proj") for layer in layers for n in "qkvo"]
    checks = {
        "its attention has biases": config.attention_bias,
        "its attention has a sliding window": config.sliding_window is not None,
        f"its rotary embedding is {rope}": rope != "default",
        f"its head dimension is {dim}": dim & (dim - 1) != 0 or not 16 <= dim <= 256,
        "its rows are too long": max(config.hidden_size, width) > _WIDEST_ROW,
        "its projections are not plain": any(type(p) is not nn.Linear for p in projections),
        "its parameters differ in dtype": len(dtypes) != 1,
        f"its dtype is {next(iter(dtypes))}": not dtypes.issubset(_DTYPES),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


class FusedLayer:
    """The forward of one Qwen3MoeDecoderLayer; its q, k and v weights become views of one."""

    def __init__(
        self,
        layer: Qwen3MoeDecoderLayer,
        index: int,
        seam: Seam,
        workspace: Workspace,
        pieces: Pieces,
    ) -> None:
        self._seam = seam
        self._workspace = workspace
        self._pieces = pieces
        self._index = index
        self._attention: Any = layer.self_attn
        self._mlp: Any = layer.mlp
        self._sparse = isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)
        self._input_norm: Any = layer.input_layernorm
        self._mlp_norm: Any = layer.post_attention_layernorm
        self._qkv_NH = join([getattr(layer.self_attn, f"{n}_proj") for n in "qkv"])
        q_norm, k_norm = layer.self_attn.q_norm, layer.self_attn.k_norm
        self._head_norms = HeadNorms(q_norm.weight.data, k_norm.weight.data, _eps(q_norm))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As Qwen3MoeDecoderLayer.forward, [B, S, H]; `attention_mask` is not read."""
        assert position_embeddings is not None, "the layer was called without position embeddings"
        batch, steps, hidden = hidden_states.shape
        x_RH = hidden_states.reshape(-1, hidden)
        entry = entry_of(cache, self._index, x_RH, batch, self._attention)
        kept = KeyValues(entry.keys, entry.values)
        cos, sin = position_embeddings
        if covers(hidden_states):
            out_RH = self._in_pieces(x_RH, cos, sin, kept, entry.cumulative_length)
            return out_RH.view(batch, steps, hidden)
        qkv_RW = self._project(x_RH)
        if steps == 1:
            heads = qkv_RW.shape[1] // kept.dim - 2 * kept.num_heads
            attended_RA = launch_attend_one(
                qkv_RW,
                self._head_norms,
                cos[:, 0],
                sin[:, 0],
                kept,
                entry.cumulative_length,
                self._workspace.scratch(batch, heads, kept),
            )
        else:
            attended_RA = self._attend_chunk(
                qkv_RW.view(batch, steps, -1), cos, sin, kept, entry.cumulative_length
            )
        return self._behind_attention(attended_RA, x_RH).view(batch, steps, hidden)

    def _project(self, x_RH: Tensor) -> Tensor:
        norm = self._input_norm
        if x_RH.shape[0] <= FEW:
            return launch_norm_linear_few(x_RH, norm.weight, _eps(norm), self._qkv_NH)
        return F.linear(launch_rms_norm(x_RH, norm.weight, _eps(norm)), self._qkv_NH)

    def _attend_chunk(
        self, qkv_BSW: Tensor, cos: Tensor, sin: Tensor, kept: KeyValues, position: Tensor
    ) -> Tensor:
        batch, steps, _ = qkv_BSW.shape
        q = launch_rotate_and_store(qkv_BSW, self._head_norms, cos, sin, kept, position)
        position.add_(steps)
        out = causal_attention(q.transpose(1, 2), kept, self._seam.position_of())
        return out.transpose(1, 2).reshape(batch * steps, -1)

    def _behind_attention(self, attended_RA: Tensor, residual_RH: Tensor) -> Tensor:
        if attended_RA.shape[0] <= FEW and self._sparse:
            h_RH = launch_linear_few(attended_RA, self._attention.o_proj.weight, residual_RH)
            return self._add_experts(self._route_few(h_RH), h_RH)
        h_RH, x_RH = self._add_and_norm(attended_RA, residual_RH)
        if not self._sparse:
            return self._add_dense(x_RH, h_RH)
        return self._add_experts(Routed(x_RH, *self._route(x_RH)), h_RH)

    def _in_pieces(
        self, x_RH: Tensor, cos: Tensor, sin: Tensor, kept: KeyValues, position: Tensor
    ) -> Tensor:
        """A short chunk of one sequence; see `pieces`."""
        pieces, index = self._pieces, self._index
        pieces.follow(index, kept, position)
        chunk = pieces.enter(x_RH, cos, sin)
        real = chunk.real
        pieces.run(index, 0, chunk, lambda: self._first_piece(chunk, kept, position))
        out = causal_attention(chunk.q_heads, kept, self._seam.position_of())
        chunk.attended_heads.copy_(out)
        pieces.run(index, 1, chunk, lambda: self._second_piece(chunk.padded))
        if not self._sparse:
            return self._add_dense(real.x_RH, real.h_RH)
        return self._add_experts(Routed(real.x_RH, real.ids_RK, real.weights_RK), real.h_RH)

    def _first_piece(self, chunk: Chunk, kept: KeyValues, position: Tensor) -> None:
        buffers = chunk.padded
        launch_rotate_and_store(
            self._project(buffers.hidden_RH)[None],
            self._head_norms,
            buffers.cos_RD[None],
            buffers.sin_RD[None],
            kept,
            position,
            chunk.num_rows,
            buffers.q_RND[None],
        )
        position.add_(chunk.num_rows)

    def _second_piece(self, buffers: Buffers) -> None:
        kept = [buffers.h_RH, buffers.x_RH]
        made = list(self._add_and_norm(buffers.attended_RA, buffers.hidden_RH))
        if self._sparse:
            routes = self._route(made[1])
            buffers.ids_RK.copy_(routes.ids_TK)
            kept.append(buffers.weights_RK)
            made.append(routes.weights_TK)
        torch._foreach_copy_(kept, made)  # one launch for all of one dtype

    def _add_and_norm(self, attended_RA: Tensor, residual_RH: Tensor) -> Normed:
        norm = self._mlp_norm
        out_RH = F.linear(attended_RA, self._attention.o_proj.weight)
        return launch_add_rms_norm(out_RH, residual_RH, norm.weight, _eps(norm))

    def _add_dense(self, x_RH: Tensor, residual_RH: Tensor) -> Tensor:
        dense_RH: Tensor = self._mlp(x_RH)
        return residual_RH + dense_RH

    def _route(self, x_RH: Tensor) -> Routes:
        gate = self._mlp.gate
        logits_RE = F.linear(x_RH, gate.weight)
        return launch_choose_experts(logits_RE, gate.top_k, bool(gate.norm_topk_prob))

    def _route_few(self, h_RH: Tensor) -> Routed:
        gate, norm = self._mlp.gate, self._mlp_norm
        return launch_route_few(
            h_RH,
            norm.weight,
            _eps(norm),
            gate.weight,
            gate.top_k,
            bool(gate.norm_topk_prob),
            self._workspace.arrivals(h_RH.device),
        )

    def _add_experts(self, routed: Routed, residual_RH: Tensor) -> Tensor:
        return self._seam.add_experts(self._mlp.experts, *routed, residual_RH)


def _without_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses a caller's mask; an empty one of four dimensions keeps the model from making its
    own.
    """
    if len(args) > 1 or kwargs.get("attention_mask") is not None:
        raise ValueError(
            "the replaced Qwen3MoeModel takes no attention_mask: its sequences have one length "
            "and no padding"
        )
    return args, {**kwargs, "attention_mask": torch.empty(0, 0, 0, 0)}


def _own_parameters(layer: Any) -> list[Tensor]:
    """The parameters of a layer except its experts'."""
    return [p for name, p in layer.named_parameters() if ".experts." not in name]


def _eps(norm: Any) -> float:
    eps: float = norm.variance_epsilon
    return eps


def _sizes(model: PreTrainedModel) -> Sizes:
    config: Any = model.config.get_text_config()
    dim: int = model.get_decoder().layers[0].self_attn.head_dim
    return Sizes(config.hidden_size, config.num_attention_heads, dim, config.num_experts_per_tok)
