"""Prefill modes: how a chunk's experts reach the device."""

from residency.policies.prefill.always_stream import AlwaysStream
from residency.policies.prefill.base import LayerView, Plan, PrefillMode
from residency.policies.prefill.demand import Demand
from residency.policies.prefill.hit_d2d import HitD2d

__all__ = ["AlwaysStream", "Demand", "HitD2d", "LayerView", "Plan", "PrefillMode"]
