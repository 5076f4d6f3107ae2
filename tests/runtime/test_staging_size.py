"""Staging is a part of a layer, so that a small device can prefill a wide one."""

from residency.conf import compose
from residency.runtime.memory import plan_memory

GIB = 1 << 30


def test_four_gigabytes_are_enough_for_a_layer_of_512_experts():
    config = compose(["model=flash_next_moe", "model.format=bf16", "cache.slots=64"])
    plan = plan_memory(config.model.architecture, config.policies, context=512)
    layer_bytes = config.model.architecture.space.num_experts * plan.row_bytes
    assert layer_bytes > 4 * GIB
    assert plan.pool_bytes + plan.staging_bytes + plan.workspace_bytes < 4 * GIB
    assert plan.staging_bytes == layer_bytes * 3 // 8  # ring / groups
