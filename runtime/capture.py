"""Whether a model's decode step may be captured as one graph: declared, and never tried out.

A graph replays what the device did. A step may be captured if it asks the host for nothing and if
no number that Python keeps has to move on between steps. Both are proven per model type in the
tests; a step that was not proven could replay wrong numbers without an error, so it runs uncaptured
and the report says so.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

# Proven as transformers writes them. Model types of the text model.
AS_WRITTEN = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
    }
)
# Known not to be, and why. A declared replacement of the type lifts its reason.
REASONS = {
    "gpt_oss": "its sliding-window cache and its masks count tokens in Python",
    "qwen4_exp_text": "its indexer makes shapes that depend on values",
}
_ATTENTION = ("sdpa", "eager")
_ROPE_BY_LENGTH = ("dynamic", "longrope")  # compare the largest position with a limit, on the host


def reason_against_capture(model: PreTrainedModel, *, replaced: bool) -> str | None:
    """Why the decode step must run uncaptured; None where a graph may hold it.

    replaced: declared replacements stand for the model's layers; each makes its type capturable.
    """
    config: Any = model.config.get_text_config()
    if rope := _rope_by_length(config):
        return f"its rotary embedding is {rope}, which asks for the largest position"
    if replaced:
        return None
    model_type = config.model_type
    if model_type in REASONS:
        return REASONS[model_type]
    if model_type not in AS_WRITTEN:
        return f"{model_type} was not proven to replay right"
    layers = StaticCache(config=model.config, max_cache_len=1).layers
    if any(isinstance(layer, StaticSlidingWindowLayer) for layer in layers):
        return "transformers' sliding-window cache counts tokens in Python"
    if config._attn_implementation not in _ATTENTION:
        return f"{config._attn_implementation} attention was not proven to replay right"
    return None


def _rope_by_length(config: Any) -> str | None:
    """The rope type that depends on the sequence's length, if there is one."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return next((k["rope_type"] for k in kinds if k.get("rope_type") in _ROPE_BY_LENGTH), None)
