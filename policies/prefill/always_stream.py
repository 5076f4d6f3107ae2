"""always_stream: every expert of every layer crosses the link, whatever the chunk's length."""

from __future__ import annotations

from residency.policies.prefill.base import LayerView, Plan, PrefillMode


class AlwaysStream(PrefillMode):
    """Streams whole layers through staging, behind the previous layer's compute."""

    def waits_for_router(self, num_tokens: int) -> bool:
        return False

    def plan(self, view: LayerView) -> Plan:
        return Plan.of(len(view.resident), stream=view.resident.new_ones(len(view.resident)))
