"""gpu: decode reads every routed expert from the device's slots; misses are fetched first.

"The device" is the one that `device` names: with device=cpu the slots are plain memory and this
target is still called gpu.
"""

from __future__ import annotations

from typing import ClassVar

from residency.policies.base import Capability
from residency.policies.decode.base import SlotTarget


class Gpu(SlotTarget):
    """Computes in the device's slots, whichever device that is."""

    provides: ClassVar[frozenset[str]] = frozenset({Capability.DECODES_FROM_SLOTS})
