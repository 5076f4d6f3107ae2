"""cpu: decode computes every routed expert on the host, in the bank where it lies.

Activations cross the link instead of weights. The slots are not used, so the combination wants
cache=none.
"""

from __future__ import annotations

from residency.policies.decode.base import DecodeTarget


class Cpu(DecodeTarget):
    """Computes where the experts lie; nothing is fetched or admitted."""

    def host_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(range(num_layers))
