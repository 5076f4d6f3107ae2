from residency.policies.cache.fifo import Fifo
from residency.testing import CachePolicyContract


class TestFifo(CachePolicyContract):
    policy = Fifo
