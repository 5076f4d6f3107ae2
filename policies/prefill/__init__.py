"""Prefill modes: how a chunk's experts reach the device. One module and one YAML file each."""

from residency.policies.prefill.base import (
    Ahead,
    Choice,
    Costs,
    LayerView,
    Plan,
    PrefillMode,
    missing_plan,
)

__all__ = ["Ahead", "Choice", "Costs", "LayerView", "Plan", "PrefillMode", "missing_plan"]
