"""Decode targets: where a decode step's routed experts are computed. One module and YAML each."""

from residency.policies.decode.base import (
    DecodeTarget,
    Line,
    Measured,
    Quotas,
    SlotTarget,
    Way,
)

__all__ = ["DecodeTarget", "Line", "Measured", "Quotas", "SlotTarget", "Way"]
