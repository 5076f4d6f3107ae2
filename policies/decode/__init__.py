"""Decode targets: where a decode step's routed experts are computed. One module and YAML each."""

from residency.policies.decode.base import DecodeTarget

__all__ = ["DecodeTarget"]
