"""Cache policies: which experts stay in the slots."""

from residency.policies.cache.base import CachePolicy
from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.cache.none import NoCache

__all__ = ["CachePolicy", "Lrfu", "Lru", "NoCache"]
