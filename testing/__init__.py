"""Contracts as pytest classes: subclass one, name your policy, and its tests are written."""

from residency.testing.cache_contract import CachePolicyContract
from residency.testing.decode_contract import DecodeContract
from residency.testing.prefill_contract import PrefillContract

__all__ = ["CachePolicyContract", "DecodeContract", "PrefillContract"]
