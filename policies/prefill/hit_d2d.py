"""hit_d2d: whole layers as always_stream, but what the slots hold is copied on the device."""

from __future__ import annotations

from typing import ClassVar

from residency.policies.base import Capability, Need
from residency.policies.prefill.base import Ahead, LayerView, Plan, PrefillMode


class HitD2d(PrefillMode):
    """Residents reach staging device to device; only the others cross the link."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            Capability.RETAINS,
            because="it copies experts that the slots retain, and this cache retains none",
            mend="cache=lru",
        ),
        Need(
            Capability.DECODES_FROM_SLOTS,
            because="it copies experts that decode left in the slots, and this target leaves none",
            mend="decode=gpu",
        ),
    )

    def ahead(self, view: LayerView) -> Ahead:
        plan = Plan.of(len(view.resident), copy=view.resident, stream=~view.resident)
        return Ahead(plan, waits=False)
