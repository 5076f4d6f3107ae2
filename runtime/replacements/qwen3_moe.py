"""Qwen3-MoE: the decoder layer in about six kernels, for chunks and for single tokens.

A replaced layer attends causally over a StaticCache with sequences of one length. It takes no
attention mask, so the model is given none to build, and a caller's own mask is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeSparseMoeBlock,
)

from residency.runtime.kernels.attention import Scratch, launch_attend_one
from residency.runtime.kernels.dense import (
    FEW,
    launch_add_rms_norm,
    launch_linear_few,
    launch_norm_linear_few,
    launch_rms_norm,
)
from residency.runtime.kernels.rotary import HeadNorms, KeyValues, launch_rotate_and_store
from residency.runtime.kernels.routing import Routed, launch_choose_experts, launch_route_few
from residency.runtime.replacements.seam import Seam

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_ROW = 16384  # elements of a weight's row that a program can hold


def replace(model: PreTrainedModel, seam: Seam) -> list[str]:
    """Bind fused forwards to the model's decoder layers and final norm; what was replaced."""
    if reason_against(model) is not None:
        return []
    body: Any = model.get_decoder()
    workspace = Workspace()
    for index, layer in enumerate(body.layers):
        layer.forward = FusedLayer(layer, index, seam, workspace).forward
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


class Workspace:
    """Decode attention's scratch, shared by the layers, which follow one another."""

    def __init__(self) -> None:
        self._arrivals: Tensor | None = None
        self._scratch: Scratch | None = None

    def arrivals(self, device: torch.device) -> Tensor:
        if self._arrivals is None:
            self._arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        return self._arrivals

    def scratch(self, batch: int, num_heads: int, cache: KeyValues) -> Scratch:
        """Made on the first step of a larger batch, so warm up before capturing a graph."""
        if self._scratch is None or self._scratch.arrivals.numel() <= batch * cache.num_heads:
            self._scratch = Scratch.empty(batch, num_heads, cache)
        return self._scratch


class FusedLayer:
    """The forward of one Qwen3MoeDecoderLayer; its q, k and v weights become views of one."""

    def __init__(
        self, layer: Qwen3MoeDecoderLayer, index: int, seam: Seam, workspace: Workspace
    ) -> None:
        self._seam = seam
        self._workspace = workspace
        self._index = index
        self._attention: Any = layer.self_attn
        self._mlp: Any = layer.mlp
        self._input_norm: Any = layer.input_layernorm
        self._mlp_norm: Any = layer.post_attention_layernorm
        attention = self._attention
        self._qkv_NH = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        q_norm, k_norm = attention.q_norm, attention.k_norm
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
        qkv_RW = self._project(x_RH)
        entry = _entry(cache, self._index, qkv_RW, batch, self._attention)
        kept = KeyValues(entry.keys, entry.values)
        cos, sin = position_embeddings
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
        out = _causal_attention(q.transpose(1, 2), kept, self._seam.position_of())
        return out.transpose(1, 2).reshape(batch * steps, -1)

    def _behind_attention(self, attended_RA: Tensor, residual_RH: Tensor) -> Tensor:
        output_HA, norm = self._attention.o_proj.weight, self._mlp_norm
        sparse = isinstance(self._mlp, Qwen3MoeSparseMoeBlock)
        if attended_RA.shape[0] <= FEW and sparse:
            h_RH = launch_linear_few(attended_RA, output_HA, residual_RH)
            return self._add_experts(self._route_few(h_RH), h_RH)
        h_RH, x_RH = launch_add_rms_norm(
            F.linear(attended_RA, output_HA), residual_RH, norm.weight, _eps(norm)
        )
        if not sparse:
            dense_RH: Tensor = self._mlp(x_RH)
            return h_RH + dense_RH
        gate = self._mlp.gate
        routes = launch_choose_experts(
            F.linear(x_RH, gate.weight), gate.top_k, bool(gate.norm_topk_prob)
        )
        return self._add_experts(Routed(x_RH, *routes), h_RH)

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


def _causal_attention(q_BHSD: Tensor, kept: KeyValues, begin: int) -> Tensor:
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


def _join(projections: list[Any]) -> Tensor:
    """One tensor of the projections' weights, which become views of it."""
    joined = torch.cat([p.weight.data for p in projections])
    parts = joined.split([p.weight.shape[0] for p in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight = nn.Parameter(part, requires_grad=False)
    return joined


def _entry(cache: Any, index: int, like: Tensor, batch: int, attention: Any) -> Any:
    entry: Any = cache.layers[index] if cache is not None else None
    if type(entry) is not StaticLayer:
        raise TypeError(
            f"a replaced Qwen3MoeDecoderLayer needs a StaticCache, not {type(cache).__name__} "
            f"with {type(entry).__name__}"
        )
    if not entry.is_initialized:
        heads = attention.config.num_key_value_heads
        states = like.new_empty(()).expand(batch, heads, 1, attention.head_dim)
        entry.lazy_initialization(states, states)
    return entry


def _without_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses a caller's mask; an empty one of four dimensions keeps the model from making its
    own.
    """
    if len(args) > 1 or kwargs.get("attention_mask") is not None:
        _refuse_mask()
    return args, {**kwargs, "attention_mask": torch.empty(0, 0, 0, 0)}


def _refuse_mask() -> NoReturn:
    raise ValueError(
        "the replaced Qwen3MoeModel takes no attention_mask: its sequences have one length and "
        "no padding"
    )


def _own_parameters(layer: Any) -> list[Tensor]:
    """The parameters of a layer except its experts'."""
    return [p for name, p in layer.named_parameters() if ".experts." not in name]


def _eps(norm: Any) -> float:
    eps: float = norm.variance_epsilon
    return eps
