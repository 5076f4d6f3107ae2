from residency.policies.cache.lru import Lru
from residency.testing import CachePolicyContract


class TestLru(CachePolicyContract):
    policy = Lru
