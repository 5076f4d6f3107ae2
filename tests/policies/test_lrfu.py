from residency.policies.cache.lrfu import Lrfu
from residency.testing import CachePolicyContract


class TestLrfu(CachePolicyContract):
    policy = Lrfu


class TestLrfuThatForgets(CachePolicyContract):
    policy = Lrfu
    params = {"history": "reset"}
