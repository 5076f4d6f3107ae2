from residency.policies.cache.lfu import Lfu
from residency.testing import CachePolicyContract


class TestLfu(CachePolicyContract):
    policy = Lfu
    params = {"half_life": 16}


class TestLfuWithoutAgeing(CachePolicyContract):
    policy = Lfu
    params = {"half_life": 0}
