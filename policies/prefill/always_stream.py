"""always_stream: every expert of every layer crosses the link, whatever the chunk's length."""

from __future__ import annotations

from residency.policies.prefill.base import Ahead, LayerView, Plan, PrefillMode


class AlwaysStream(PrefillMode):
    """Streams whole layers through staging, behind the previous layer's compute."""

    def ahead(self, view: LayerView) -> Ahead:
        num_experts = len(view.resident)
        everything = view.resident.new_ones(num_experts)
        return Ahead(Plan.of(num_experts, stream=everything), waits=False)
