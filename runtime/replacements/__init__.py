"""Declared replacements of transformers' modules by fused ones, one file per model type.

A replacement computes what the original does, from the original's own parameters, with fewer
kernels, or so that a graph can hold the decode step; it is tested against the original, and it must
leave the decode step capturable (see `capture`). Model types without a file here, models on the CPU
and configurations that a replacement does not cover run transformers' own code.
"""

from __future__ import annotations

from importlib import import_module

from transformers import PreTrainedModel

from residency.runtime.replacements.seam import Seam

__all__ = ["REPLACEMENTS", "Seam", "apply"]

# Imported on use: they need Triton, which not every machine has.
REPLACEMENTS = {
    "gpt_oss": "residency.runtime.replacements.gpt_oss",
    "qwen3_moe": "residency.runtime.replacements.qwen3_moe",
    "qwen4_exp_text": "residency.runtime.replacements.qwen4_exp",
}


def apply(model: PreTrainedModel, seam: Seam, *, on_cpu: bool = False) -> list[str]:
    """Replace what can be replaced in `model`; returns one line per kind of module replaced.

    The model must lie on its device in its final dtype, and be moved or cast no more.
    on_cpu: also replace on the CPU, where the kernels need Triton's interpreter (for tests).
    """
    name = REPLACEMENTS.get(model.config.get_text_config().model_type)
    if name is None or (model.device.type != "cuda" and not on_cpu):
        return []
    replaced: list[str] = import_module(name).replace(model, seam)
    return replaced
