from residency.policies.cache.lrfu import Lrfu
from residency.testing import CachePolicyContract


class TestLrfu(CachePolicyContract):
    policy = Lrfu
