"""Contracts as pytest classes: subclass one, name your policy, and its tests are written."""

from residency.testing.cache_contract import CachePolicyContract

__all__ = ["CachePolicyContract"]
