"""Fused touches equal the policies' tensor form, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.kernels.touch import touch_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPACE = IdSpace(2, 8, 4)
POLICIES = [
    (Lru, {}),
    (Lrfu, {"decay": 0.1}),
    (Lrfu, {"decay": 0.0, "prefill_weight": 0.3}),
    (Lrfu, {"decay": 1.0, "prefill_weight": 1e-300}),
]


@pytest.mark.parametrize(("policy", "params"), POLICIES)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 200_000),
            st.sets(st.integers(0, 7), min_size=1, max_size=4),
            st.sampled_from(list(Phase)),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(deadline=None, max_examples=15)
def test_equal_to_the_tensor_form(policy, params, steps):
    plain, fused = (policy(policy.Config(**params)) for _ in range(2))
    for made in (plain, fused):
        made.allocate(SPACE, DEVICE)
    touch, token = touch_of(fused), 0
    assert touch != fused.touch
    for gap, experts, phase in steps:
        token += gap
        ids = [8 + e for e in sorted(experts)]
        unique = torch.tensor(ids + [SPACE.sink] * (4 - len(ids)), device=DEVICE)
        step = Step(torch.tensor(token, device=DEVICE), 1, phase)
        plain.touch(unique, step)
        touch(unique, step)
        for name, tensor in plain.state().items():
            assert torch.equal(tensor[:-1], fused.state()[name][:-1]), name
