"""Experts computed on the host where they lie, in every format: decode's other place."""

from residency.runtime.host_experts.host import (
    HostExperts,
    NativeHostExperts,
    TorchHostExperts,
    open_host_experts,
)
from residency.runtime.host_experts.jobs import HostJob

__all__ = [
    "HostExperts",
    "HostJob",
    "NativeHostExperts",
    "TorchHostExperts",
    "open_host_experts",
]
