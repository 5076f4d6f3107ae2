"""auto and hybrid begin with a machine's profile, and real steps displace it."""

import numpy as np
import pytest
import torch
from conftest import tiny_engine
from machines import machine

from residency.policies.decode.hybrid import Hybrid
from residency.policies.prefill import Costs, LayerView
from residency.policies.prefill.auto import AHEAD, WAIT, Auto
from residency.policies.step import IdSpace
from residency.runtime.environment import environment
from residency.runtime.formats import FORMATS
from residency.runtime.layout import RowLayout
from residency.runtime.learning import Learning
from residency.runtime.link_costs import LinkCosts
from residency.runtime.machine.measurement import CHUNK_LAYER, GATHER, LINK_BUSY, host_experts
from residency.runtime.machine.profile import machine_path, write_machine
from residency.runtime.machine.starts import assumed_costs, known_rates
from residency.runtime.quotas import QuotaTable
from residency.runtime.rates import Rates, StepTimes

SPACE = IdSpace(3, 16, 4)
SHAPES = {"gate_up_proj": (256, 128), "down_proj": (128, 128)}
LAYOUT = RowLayout.of(SHAPES, FORMATS["bf16"], torch.bfloat16)
CPU = torch.device("cpu")


def table(rates=None, **changes):
    known = known_rates(machine(rates, **changes), LAYOUT)
    return QuotaTable(Hybrid(Hybrid.Config()), SPACE, CPU, known)


def test_without_a_profile_hybrid_tries_the_link_first():
    own = QuotaTable(Hybrid(Hybrid.Config()), SPACE, CPU)
    assert own.of(0, 4)[:5].tolist() == [0, 1, 2, 3, 4]


def test_the_profile_decides_what_hybrid_does_first():
    slow = {host_experts("bf16", beside=b): 1e6 for b in (False, True)}
    assert table(slow).of(0, 4)[:5].tolist() == [0, 1, 2, 3, 4]
    fast = {host_experts("bf16", beside=b): 1e14 for b in (False, True)} | {"host turn": 1e-9}
    assert table(fast | {GATHER: 1e6, "gather of 1": 1e6}).of(0, 4)[:5].tolist() == [0] * 5
    alike = {name: 50e9 for name in (GATHER, "gather of 1", "gather of 64, CPU busy")}
    alike |= {host_experts("bf16", beside=b): 50e9 for b in (False, True)} | {"host turn": 1e-9}
    row = table(alike).of(0, 4)
    assert 0 < row[4] < 4
    assert "began with the machine's profile" in table(alike).notes()[0]


def test_real_steps_displace_what_was_assumed():
    rates = Rates(1, known_rates(machine(), LAYOUT), 4)
    assert (rates.measured().steps == 8).all()
    before = float(rates.measured().fetched.each_s)
    step = StepTimes(*map(np.array, ([3], [3 * 0.5], [0], [0.0])))
    for _ in range(8):
        rates.observe([step])
    after = rates.measured().fetched
    assert float(after.each_s) == pytest.approx(0.5, rel=1e-6) and before < 1e-3
    assert rates.measured().idle_s[0, 0] == 0


def test_known_lines_are_what_is_told_at_first():
    known = known_rates(machine(), LAYOUT)
    measured = Rates(2, known, 4).measured()
    for line, told in zip(known, (measured.fetched, measured.computed), strict=False):
        two = float(told.seconds(torch.tensor([2.0]))[0])
        assert two == pytest.approx(line.fixed_s + 2 * line.each_s, rel=0.05)


def test_a_format_that_was_not_measured_begins_with_nothing():
    assert known_rates(machine({host_experts("bf16"): None}), LAYOUT) is None
    assert known_rates(machine({GATHER: None}), LAYOUT) is None


def auto(costs):
    chances = torch.full((16,), 0.3, dtype=torch.float64)
    nobody = torch.zeros(16, dtype=torch.bool)
    return Auto(Auto.Config()).ahead(
        LayerView(0, 16, nobody, ~nobody, chances=chances, costs=costs)
    )


def test_the_profile_decides_what_auto_does_first():
    """By how long the link would idle otherwise: with nothing known it waits and fetches late."""
    assert auto(None).choice.name == WAIT
    expert_s = LAYOUT.row_bytes / 1e9
    for idle_s, choice in ((0.0, WAIT), (3 * expert_s, AHEAD)):
        profile = machine({LINK_BUSY: 1e9, CHUNK_LAYER: idle_s or None})
        costs = assumed_costs(profile, LAYOUT)
        assert costs == Costs(expert_s, idle_s)
        learning = Learning(SPACE, Auto(Auto.Config()), assumed=costs)
        learning.begin(16)
        told = learning.told(
            LayerView(0, 16, *[torch.zeros(16, dtype=torch.bool)] * 2), alone=False
        )
        assert auto(told.costs).choice.name == choice


def test_assumed_costs_are_never_kept_and_end_with_the_first_measured():
    costs = LinkCosts(assumed=Costs(2.0, 1.0))
    assert costs.of(16) == Costs(2.0, 1.0)
    assert costs.as_dict()["expert_s"] is None
    measured = {"expert_s": 5.0, "answer_s": 0.0, "gap_s": {"16": 3.0}, "host_s": {}}
    assert LinkCosts(measured, assumed=Costs(2.0, 1.0)).of(16) == Costs(5.0, 3.0)
    assert LinkCosts(beside=False, assumed=Costs(2.0, 1.0)).of(16) == Costs(2.0, 0.0)


def test_an_engine_begins_with_the_profile_of_its_device(checkpoint, monkeypatch, tmp_path):
    """And leaves the results as they are: only what is done first differs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    for known in (False, True):
        if known:
            name = environment(CPU)["device_name"]
            fast = {host_experts("fp32", beside=b): 1e15 for b in (False, True)}
            profile = machine(fast | {GATHER: 1e3}, device="cpu", name=name)
            write_machine(machine_path(name), profile, "--out")
        with tiny_engine(
            checkpoint, "prefill=auto", "decode=hybrid", "cache.slots=8", "cache=lru"
        ) as engine:
            assert (engine._lessons.known_rates is not None) == known
            row = engine.runtime.quotas.of(0, 2)
            assert row[:3].tolist() == ([0, 0, 0] if known else [0, 1, 2])
            report = engine.generate([1, 2, 3, 4], max_new_tokens=4, ignore_eos=True)
            said.append(report.token_ids)
            noted = any("began with the machine's profile" in note for note in report.notes)
            assert noted == known
            engine.runtime._prefill.learning._profile.unlink(missing_ok=True)
    assert said[0] == said[1]
