"""Decode targets: where a decode step's routed experts are computed."""

from residency.policies.decode.base import DecodeTarget
from residency.policies.decode.cpu import Cpu
from residency.policies.decode.gpu import Gpu

__all__ = ["Cpu", "DecodeTarget", "Gpu"]
