"""A policy that breaks its contract at run time is stopped: one line, its name and the rule."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from command import assert_one_line
from conftest import tiny_engine

from residency.policies.cache import CachePolicy
from residency.policies.decode import Quotas
from residency.policies.decode.gpu import Gpu
from residency.policies.errors import PolicyError
from residency.policies.prefill import Ahead, Plan, PrefillMode
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.policy_probe import probe
from residency.runtime.rules import Call
from residency.runtime.sequence import DecodeStep
from residency.runtime.slots import SlotPool

SPACE = IdSpace(num_layers=3, num_experts=8, top_k=2)  # of the tiny checkpoint
PROMPT = list(range(3, 20))
CPU = torch.device("cpu")
NAME = __name__.rpartition(".")[2]


class Fine(CachePolicy):
    def touch(self, ids, step):
        self.keys[ids] = step.token


def breaking(**methods):
    """A cache policy with some methods of its own."""
    return type("Breaking", (Fine,), methods | {"__module__": __name__})(Fine.Config(slots=6))


def raises(self, *_):
    raise IndexError("row 99\nis not there")


def too_few(self, space, device):
    Fine.allocate(self, space, device)
    self.keys = self.keys[:-1]


def of_floats(self, space, device):
    Fine.allocate(self, space, device)
    self.keys = self.keys.double()


def forgotten(self, space, device):
    Fine.allocate(self, space, device)
    self.state = dict


def replaces(self, ids, step):
    self.keys = self.keys.scatter(0, ids, 1)


def adds_state(self, ids, step):
    self.keys[ids] = step.token
    self.last = self.keys.clone()


def wrong_rows(self, ids, step):
    self.keys[ids] = self.keys[: len(ids) + 1].clone()


def elsewhere(self, space, device):
    Fine.allocate(self, space, device)
    self.last = torch.zeros(space.num_ids + 1)


def reads(self, ids, step):
    if (self.keys[ids] > 0).any():
        self.keys[ids] = step.token


def finds(self, ids, step):
    self.keys[self.keys.nonzero().flatten()] += 1


def items(self, step):
    self.keys += int(step.token)


BREACHES = {
    "raises": (dict(touch=raises), "touch broke off with IndexError: row 99;", "it takes any ids"),
    "keys of too few rows": (dict(allocate=too_few), "keys of int64 [24]", "there are 24 ids"),
    "keys of floats": (dict(allocate=of_floats), "keys of float64 [25]", "keys are int64"),
    "keys outside of the state": (dict(allocate=forgotten), "keys that state() does not name"),
    "other keys": (dict(touch=replaces), "touch puts other keys", "updated in place"),
    "other state": (dict(touch=adds_state), "touch puts another last", "updated in place"),
    "state elsewhere": (
        dict(allocate=elsewhere),
        "allocate makes last on cpu",
        "the device that it is given",
    ),
    "reads a value": (dict(touch=reads), "touch broke off", "on the host: no .item()"),
    "finds by value": (dict(touch=finds), "touch broke off", "on the host: no .item()"),
    "reads the clock": (dict(refresh=items), "refresh broke off", "on the host: no .item()"),
    "admits by number": (dict(admits=lambda s, i, t: i), "admits answers a tensor of int64"),
    "admits a bool": (dict(admits=lambda s, i, t: True), "admits answers a bool"),
    "admits too few": (dict(admits=lambda s, i, t: i[1:] > 0), "admits answers [", "] for ["),
    "moves": (dict(follows_moves=True, moved=raises), "moved broke off with IndexError"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_found_before_anything_runs(name):
    methods, *words = BREACHES[name]
    with pytest.raises(PolicyError) as caught:
        probe(breaking(**methods), SPACE)
    assert_one_line(str(caught.value), f"cache={NAME}: ", "; the rule: ", *words)


def test_a_policy_that_keeps_the_rules_passes_and_stays_as_it_was():
    policy = breaking()
    probe(policy, SPACE)
    assert not hasattr(policy, "keys")


def late(method):
    """Breaks off when the clock is past the prompt, as only a run on real values shows."""

    def touch(self, ids, step):
        self.keys[ids] = step.token
        if step.token.device.type != "meta" and step.token > len(PROMPT):
            method(self, ids, step)

    return touch


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (raises, "broke off with IndexError: row 99"),
        (replaces, "puts other keys"),
        (wrong_rows, "broke off with RuntimeError: shape mismatch"),
    ],
)
def test_a_breach_in_the_middle_of_a_run_stops_it(checkpoint, method, words):
    with tiny_engine(checkpoint, "cache=lru", "cache.slots=6") as engine:
        policy = breaking(touch=late(method))
        policies = type(engine.policies)(policy, engine.policies.prefill, engine.policies.decode)
        with engine.reconfigured(policies), pytest.raises(PolicyError) as caught:
            engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
        assert_one_line(str(caught.value), f"cache={NAME}: touch", words)
        assert engine.generate(PROMPT, max_new_tokens=1).token_ids, "the engine goes on"


def test_an_answer_that_is_none_at_one_time_and_not_at_another_is_refused():
    def admits(self, ids, step):
        return None if getattr(self, "asked", 0) else torch.zeros_like(ids, dtype=torch.bool)

    policy = breaking(admits=admits)
    pool = SlotPool(SPACE, 6, policy, CPU)
    policy.asked = 1
    with pytest.raises(PolicyError, match="None at one time and not at another"):
        pool.admit(torch.tensor([0]), Step(torch.tensor(0), 0, Phase.DECODE))


def test_memory_that_is_used_up_and_an_interrupt_are_no_breach():
    for error in (MemoryError(), torch.OutOfMemoryError(), KeyboardInterrupt()):

        def fails(self, ids, step, error=error):
            raise error

        pool = SlotPool(SPACE, 6, breaking(touch=fails), CPU)
        with pytest.raises(type(error)):
            pool.touch(torch.tensor([0]), Step(torch.tensor(0), 0, Phase.DECODE))


class Mode(PrefillMode):
    def __init__(self, answer):
        super().__init__(PrefillMode.Config())
        self.answer = answer

    def ahead(self, view):
        return self.answer(view)


def whole(view, **masks):
    every = torch.ones_like(view.resident)
    return Ahead(Plan.of(len(every), **({"stream": every} | masks)), waits=False)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda view: 1 / 0, "ahead broke off with ZeroDivisionError"),
        (lambda view: None, "ahead answers a NoneType"),
        (lambda view: Ahead(None, waits=False), "ahead answers a NoneType for a plan"),
        (lambda view: whole(view, stream=torch.ones(8)), "another kind of mask for stream"),
        (lambda view: whole(view, copy=view.resident[1:]), "another kind of mask for copy"),
    ],
)
def test_a_mode_that_breaks_the_rules_is_stopped(checkpoint, monkeypatch, answer, words):
    with tiny_engine(checkpoint, "prefill=hit_d2d", "cache.slots=6") as engine:
        monkeypatch.setattr(engine.runtime._prefill, "mode", Mode(answer))
        with pytest.raises(PolicyError) as caught:
            engine.generate(PROMPT, max_new_tokens=1)
        assert_one_line(str(caught.value), f"prefill={NAME}: ", words, "; the rule: ")


def test_a_mode_that_waits_without_a_second_plan_is_named(checkpoint, monkeypatch):
    with tiny_engine(checkpoint, "prefill=hit_d2d", "cache.slots=6") as engine:
        mode = Mode(lambda view: Ahead(Plan.of(8), waits=True))
        monkeypatch.setattr(engine.runtime._prefill, "mode", mode)
        with pytest.raises(PolicyError, match=f"^prefill={NAME}: waits for routers and has no"):
            engine.generate(PROMPT, max_new_tokens=1)


def table(make, steps=1):
    return lambda measured, most: Quotas(make(len(measured.misses), most), steps)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda measured, most: 1 / 0, "quotas broke off with ZeroDivisionError"),
        (lambda measured, most: None, "quotas answers a NoneType"),
        (table(lambda n, most: torch.zeros(n, most, dtype=torch.int64)), "answers no table of [3"),
        (table(lambda n, most: torch.zeros(n, most + 1)), "a table of torch.float32"),
        (table(lambda n, most: torch.full((n, most + 1), 9)), "more experts to fetch"),
        (table(lambda n, most: torch.zeros(n, most + 1, dtype=torch.int64), 0), "after 0 steps"),
    ],
)
def test_a_target_that_breaks_the_rules_is_stopped(checkpoint, answer, words):
    class Target(Gpu):
        splits = True

        def quotas(self, measured, most):
            return answer(measured, most)

    with tiny_engine(checkpoint, "prefill=hit_d2d", "cache.slots=6") as engine:
        own = engine.policies
        policies = type(own)(own.cache, own.prefill, Target(Gpu.Config()))
        with engine.reconfigured(policies), pytest.raises(PolicyError) as caught:
            engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
        assert_one_line(str(caught.value), f"decode={NAME}: ", words, "; the rule: ")


def test_a_breach_in_a_capture_is_told_and_not_what_it_did_to_the_capture(monkeypatch):
    @contextmanager
    def graph(*_, **__):
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture") from None

    def forward(ids):
        with Call(breaking(), "touch"):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    runtime = SimpleNamespace(recorded=lambda *_: nullcontext())
    with pytest.raises(PolicyError) as caught:
        DecodeStep(runtime, forward)._capture(torch.zeros(1, 1, dtype=torch.int64))
    words = "not permitted when stream is capturing", "on the host: no .item()"
    assert_one_line(str(caught.value), f"cache={NAME}: touch broke off", *words)
