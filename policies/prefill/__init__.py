"""Prefill modes: how a chunk's experts reach the device. One module and one YAML file each."""

from residency.policies.prefill.base import LayerView, Plan, PrefillMode

__all__ = ["LayerView", "Plan", "PrefillMode"]
