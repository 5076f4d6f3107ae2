"""in_place: whole layers as always_stream, but what the slots hold is read where it lies."""

from __future__ import annotations

from typing import ClassVar

from residency.policies.base import Capability, Need
from residency.policies.prefill.base import Ahead, LayerView, Plan, PrefillMode


class InPlace(PrefillMode):
    """Residents are computed first, in their slots; only the others cross the link."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            Capability.RETAINS,
            because="it reads experts that the slots retain, and this cache retains none",
            mend="cache=lru",
        ),
        Need(
            Capability.DECODES_FROM_SLOTS,
            because="it reads experts that decode left in the slots, and this target leaves none",
            mend="decode=gpu",
        ),
    )

    def ahead(self, view: LayerView) -> Ahead:
        plan = Plan.of(len(view.resident), in_place=view.resident, stream=~view.resident)
        return Ahead(plan, waits=False)
