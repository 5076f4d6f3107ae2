from residency.policies.cache.least_stale import LeastStale
from residency.testing import CachePolicyContract


class TestLeastStale(CachePolicyContract):
    policy = LeastStale
