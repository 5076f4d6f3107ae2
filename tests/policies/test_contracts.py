"""The modes and targets that there are keep the contracts; broken ones do not."""

from dataclasses import replace

import pytest
import torch

from residency.conf.build import build_part
from residency.conf.options import option_names, option_node
from residency.policies.cache import CachePolicy
from residency.policies.decode import Quotas
from residency.policies.decode.gpu import Gpu
from residency.policies.prefill.hit_d2d import HitD2d
from residency.testing import CachePolicyContract, DecodeContract, PrefillContract


@pytest.fixture(params=option_names("prefill"))
def mode(request):
    return request.param


@pytest.fixture(params=option_names("decode"))
def target(request):
    return request.param


class TestModes(PrefillContract):
    @pytest.fixture(autouse=True)
    def _name(self, mode):
        self.name = mode

    def make(self):
        return build_part("prefill", option_node("prefill", self.name))


class TestTargets(DecodeContract):
    @pytest.fixture(autouse=True)
    def _name(self, target):
        self.name = target

    def make(self):
        return build_part("decode", option_node("decode", self.name))


class Forgetful(HitD2d):
    """Leaves out what the slots hold."""

    def ahead(self, view):
        ahead = super().ahead(view)
        return replace(ahead, plan=replace(ahead.plan, copy=torch.zeros_like(view.resident)))


class Generous(Gpu):
    splits = True

    def quotas(self, measured, most):
        return Quotas(torch.full((len(measured.misses), most + 1), most), steps=1)


class Reader(CachePolicy):
    """Looks at a value."""

    def touch(self, ids, step):
        if self.keys[ids].max() < 9:
            self.keys[ids] += 1


class Counter(CachePolicy):
    """Remembers in Python."""

    calls = 0

    def touch(self, ids, step):
        self.calls += 1
        self.keys[ids] = ids * 0 + self.calls


class Replacer(CachePolicy):
    def touch(self, ids, step):
        self.keys = self.keys.scatter(0, ids, step.token.expand(len(ids)))


def failures(contract, **attributes):
    """The names of the contract's tests that fail."""
    case = type("Case", (contract,), attributes)()
    failed = set()
    for name in [name for name in dir(case) if name.startswith("test_")]:
        try:
            getattr(case, name)()
        except Exception:
            failed.add(name)
    return failed


@pytest.mark.parametrize(
    ("contract", "key", "part", "test"),
    [
        (PrefillContract, "mode", Forgetful, "test_every_plan_reads_each_needed_expert"),
        (DecodeContract, "target", Generous, "test_of_m_missing_experts_none_to_m"),
        (CachePolicyContract, "policy", Reader, "test_no_step_needs_the_host"),
        (CachePolicyContract, "policy", Reader, "test_a_captured_step_replays"),
        (CachePolicyContract, "policy", Counter, "test_a_captured_step_replays"),
        (CachePolicyContract, "policy", Counter, "test_saved_state_continues"),
        (CachePolicyContract, "policy", Replacer, "test_state_stays_where_it_is"),
    ],
)
def test_what_breaks_a_contract_fails_its_test(contract, key, part, test):
    assert any(name.startswith(test) for name in failures(contract, **{key: part}))


def test_a_mode_of_parameters_is_made_with_them():
    class Case(PrefillContract):
        mode = HitD2d
        params = {"groups": 3}

    assert Case().make().config.groups == 3
