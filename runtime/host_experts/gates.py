"""The gates of experts modules that the native library has a form for."""

from __future__ import annotations

from typing import Any, NamedTuple

from residency.runtime.host_experts import native


class Gate(NamedTuple):
    """What lies between an expert's matrices. interleaved: gate_up's rows alternate."""

    activation: int
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0


def gate_of(module: Any) -> Gate | None:
    """The gate of an experts module of transformers; None where the library has no form for it."""
    name = type(module)._apply_gate.__qualname__
    if name == "GptOssExperts._apply_gate":
        return Gate(native.CLAMPED_SWIGLU, True, float(module.alpha), float(module.limit))
    activation = type(getattr(module, "act_fn", None)).__name__
    plain = name == "_default_apply_gate" and getattr(module, "has_gate", True)
    return Gate(native.SILU) if plain and activation in ("SiLU", "SiLUActivation") else None
