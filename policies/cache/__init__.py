"""Cache policies: which experts stay in the slots. One module and one YAML file each."""

from residency.policies.cache.base import CachePolicy

__all__ = ["CachePolicy"]
