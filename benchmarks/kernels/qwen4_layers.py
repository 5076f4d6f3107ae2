"""Time of Qwen4's layers other than their experts: a decode step as a graph, and a longer chunk.

python benchmarks/kernels/qwen4_layers.py --out FOLDER

By kind of layer: linear attention, the same with n-grams, and attention below and above the
indexer's budget; each with the next mixer, which adds what is pending. An addition stands for the
experts. Weights are made up and of the real shape;
results are first held against the same layer's torch definitions where the kernels have them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import timing
import torch
from timing import Bench
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from residency.runtime.kernels.gated_delta import delta_step, launch_delta_step
from residency.runtime.kernels.hyper import Streams, launch_mix, mix
from residency.runtime.models.qwen4_exp import Qwen4Exp
from residency.runtime.replacements.qwen4_blocks import IndexedAttention, LinearAttention
from residency.runtime.replacements.qwen4_cache import cache_of
from residency.runtime.replacements.qwen4_exp import FusedLayer
from residency.runtime.replacements.seam import Seam

KINDS = ("linear attention", "with n-grams", "attention")  # of layers 0, 1 and 3
PLACES = (0, 1, 3)
COPIES = 3  # of four layers: more than the L2 cache keeps
TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "hc_lowrank": 8, "indexer_head_dim": 16, "indexer_budget": 16, "ple_embed_dim": 32,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "vocab_size": 32,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
# Experts are left out, and the n-gram table is short: its rows lie on the device here.
SMALL = {"num_hidden_layers": 4, "num_experts": 16, "ngram_vocab_size_base": 1000}


class Four(NamedTuple):
    """Layers, each with its weights apart, over one cache."""

    layers: list[FusedLayer]
    cache: Any
    config: Any


def main() -> None:
    options = timing.parser(__doc__).parse_args()
    bench = Bench("kernels-qwen4_layers", options)
    for context in (40,) if bench.dry else (256, 4096):
        fours = [
            four(bench, context + (64 if bench.dry else 1024))
            for _ in range(1 if bench.dry else COPIES)
        ]
        check(bench, fours[0])
        for tokens in (2,) if bench.dry else (1, 16, 512):
            time_layers(bench, fours, context, tokens)
    bench.write()


def four(bench: Bench, capacity: int) -> Four:
    sizes = {**Qwen4Exp.sizes, **(TINY if bench.dry else {}), **SMALL}
    config = Qwen4ExpTextConfig(**sizes)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype)
    for parameter in model.requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.02)
    seam = Seam(lambda: 0, lambda experts, x, ids, weights, residual: residual + x)
    layers = [FusedLayer(layer, i, seam) for i, layer in enumerate(model.model.layers)]
    static = StaticCache(config=config, max_cache_len=capacity)
    like = bench.normal(1, 1, config.hidden_size)
    cache = cache_of(static, config, model.model.rotary_emb.inv_freq, like)
    return Four(layers, cache, config)


def check(bench: Bench, own: Four) -> None:
    """A mixer and a step of the delta rule of the layers' own weights."""
    layer = own.layers[0]
    assert isinstance(layer._attention, LinearAttention)
    mixer = layer._attention_mixer
    rows = bench.normal(1, own.config.hidden_size * own.config.hc_count)
    bench.check("mixer", launch_mix(Streams(rows), mixer).x_RH, mix(Streams(rows), mixer).x_RH)
    heads = layer._attention._heads
    mixed = bench.normal(1, 1, heads.width)
    gates = bench.normal(1, 1, heads.num_values * (heads.value_dim + 2))
    state = torch.randn(1, heads.num_values, heads.key_dim, heads.value_dim, device=bench.device)
    got = launch_delta_step(mixed, gates, state.clone(), heads)
    bench.check("delta rule", got, delta_step(mixed, gates, state.clone(), heads), 2e-2)


def time_layers(bench: Bench, fours: list[Four], context: int, tokens: int) -> None:
    """Each kind of layer behind `context` tokens; the position stands still."""
    config = fours[0].config
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=bench.device)
    rows = bench.normal(tokens, config.hidden_size * config.hc_count)
    for own in fours:
        own.cache.position.fill_(context)
    for kind, place in zip(KINDS, PLACES, strict=True):

        def call(own: Four, place: int = place) -> Tensor:
            layer = own.layers[place]
            streams = layer(Streams(rows), ids, own.cache, context)
            return launch_mix(streams, layer._attention_mixer).x_RH

        layer = fours[0].layers[place]
        num_bytes = sum(weight.nbytes for weight in weights(layer))
        calls = [lambda own=own, call=call: call(own) for own in fours for _ in range(4)]
        bench.time(
            "layer of a step" if tokens == 1 else "layer of a chunk",
            calls, num_bytes, 2.0 * tokens * num_bytes / rows.itemsize,
            layer=kind, tokens=tokens, context=context,
            sparse=isinstance(layer._attention, IndexedAttention) and fours[0].cache.sparse,
        )  # fmt: skip


def weights(layer: FusedLayer) -> list[Tensor]:
    """The matrices that every token is multiplied by."""
    mixers = (layer._attention_mixer, layer._experts_mixer)
    own = [part for mixer in mixers for part in (mixer.down_WC, mixer.up_CL)]
    attention: Any = layer._attention
    out = attention._out_HV if isinstance(attention, LinearAttention) else attention._out_HA
    own += [attention._in_WH, out, layer._row_WH, layer._down_HF]
    return own if layer._lexical is None else [*own, layer._lexical._key_value_WE]


if __name__ == "__main__":
    main()
