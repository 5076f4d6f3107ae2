from residency.policies.cache.none import NoCache
from residency.testing import CachePolicyContract


class TestNoCache(CachePolicyContract):
    policy = NoCache
