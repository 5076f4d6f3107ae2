"""freetoken on our conversations, as far as that goes without it: turns, routes, the result."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_benchmarks import BENCHMARKS, script
from torch.fx.experimental.proxy_tensor import make_fx

from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.conversation import common_prefix
from residency.runtime.route_tables import even
from residency.runtime.routing import TableRouting

OURS = BENCHMARKS / "results" / "conversation-demo" / "result.json"


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    core = ModuleType("freetoken.core")
    core.SamplingParams = lambda **keys: SimpleNamespace(**keys)
    monkeypatch.setitem(sys.modules, "freetoken", ModuleType("freetoken"))
    monkeypatch.setitem(sys.modules, "freetoken.core", core)
    return script(BENCHMARKS / "peers" / "freetoken_conversation.py")


class Engine:
    """As freetoken is seen from outside: a request leaves its prompt and its answer in the prefix
    cache, all but the newest token, and the next one finds what it begins with, but for one token.
    """

    def __init__(self):
        self.engine = SimpleNamespace()
        self.kept, self.prefilled = [], []

    def send_result(self, messages):
        """Where freetoken's own replies go."""

    def generate(self, prompts, sampling):
        (prompt,) = prompts
        cached = max((common_prefix(held, prompt[:-1]) for held in self.kept), default=0)
        answer = [7] * sampling.max_tokens
        self.prefilled.append(len(prompt) - cached)
        self.kept.append(prompt + answer[:-1])
        self.send_result([SimpleNamespace(uid=0, cached_tokens=cached)])
        for token in answer:
            self.send_result([SimpleNamespace(uid=0, next_token=token)])
        return [{"token_ids": answer}]


def turn(number, new, cached, answer, steps):
    tokens = {"new_tokens": new, "cached_tokens": cached, "answer_tokens": answer}
    return {"session": "s", "turn": number, **tokens, "schedule": {"decode_steps": steps}}


CUT_BACK = [turn(1, 10, 0, 4, 3), turn(2, 5, 8, 1, 0), turn(3, 2, 13, 2, 1), turn(1, 9, 0, 2, 1)]


def played(driver, like, repeats=2, warmups=1):
    engine = Engine()
    options = Namespace(seed=0, repeats=repeats, warmups=warmups)
    peer = driver.Peer(engine, options, None)
    return engine, list(peer.turns(driver.turns_of(like)))


@pytest.mark.parametrize(
    "like", [json.loads(OURS.read_text()), {"turns": CUT_BACK}], ids=["demo", "cut back"]
)
def test_the_peer_prefills_what_ours_prefilled(driver, like):
    """Of each run, the ones before the answer as well."""
    engine, turns = played(driver, like)
    for ours, peer in zip(like["turns"], turns, strict=True):
        for name in ("new_tokens", "cached_tokens", "answer_tokens"):
            assert peer[name] == ours[name], name
        assert peer["asked"] == {name: ours[name] for name in peer["asked"]}
        assert [run["cached_tokens"] for run in peer["runs"]] == [ours["cached_tokens"]] * 2
    assert engine.prefilled == [ours["new_tokens"] for ours in like["turns"] for _ in range(3)]


def test_a_prefix_that_was_not_found_is_said(driver):
    """A peer without a prefix cache."""
    engine = Engine()
    engine.kept = type("Nothing", (list,), {"append": lambda self, held: None})()
    peer = driver.Peer(engine, Namespace(seed=0, repeats=1, warmups=0), None)
    second = list(peer.turns(driver.turns_of({"turns": CUT_BACK})))[1]
    assert (second["new_tokens"], second["cached_tokens"]) == (13, 0)
    assert second["asked"] == {"new_tokens": 5, "cached_tokens": 8}


def test_the_clock_of_ours_never_goes_back_within_a_session(driver):
    assert [one.shift for one in driver.turns_of({"turns": CUT_BACK})] == [0, 5, 5, 0]


@pytest.mark.parametrize("shift", [0, 5, 45])
def test_a_peers_token_goes_where_ours_goes(driver, shift):
    """A chunk behind 8 cached tokens, then decode steps, across the table's end."""
    table = even(IdSpace(3, 8, 2), seed=0, num_tokens=64).table_NLK
    ours, peer = TableRouting(table), driver.TableRoutes(table)
    peer.start(shift)
    steps = [(Phase.PREFILL, torch.arange(8, 19))]
    steps += [(Phase.DECODE, torch.tensor([position])) for position in (19, 20)]
    for phase, positions in steps:
        last = torch.tensor(int(positions[-1]) + shift)
        for layer in range(3):
            routed = ours.routes(Step(last, layer, phase), torch.zeros(len(positions), 2))
            assert torch.equal(peer.ids(layer, positions.int()).long(), routed)


def test_a_recorded_step_picks_rows_by_tensors(driver):
    """As a captured graph: Python ran once, and only what tensors hold can change."""
    table = even(IdSpace(2, 8, 2), seed=0, num_tokens=64).table_NLK
    routes = driver.TableRoutes(table)
    positions = torch.tensor([3], dtype=torch.int32)
    step = make_fx(lambda at: torch.stack([routes.ids(layer, at) for layer in range(2)]))(positions)
    for at, shift in ((3, 0), (4, 0), (4, 9), (60, 9)):
        positions.fill_(at)
        routes.start(shift)
        assert torch.equal(step(positions)[:, 0], table[(at + shift) % 64].int())


def test_the_result_and_the_picture(driver, tmp_path):
    ours = json.loads(OURS.read_text())
    _, turns = played(driver, ours)
    options = dict(model=Path("m"), out=tmp_path, like=OURS, slots=4, hit_d2d=False, max_fetch=-1)
    options = Namespace(**options, strategy="offload", routing="skewed")
    driver.write(options, ours, turns, ["routing: skewed"])
    peer = json.loads((tmp_path / "result.json").read_text())
    assert peer["kind"] == "peer_conversation" and peer["plan"]["routing"] == "skewed"
    assert peer["sums"]["new_tokens"] == sum(one["new_tokens"] for one in ours["turns"])
    assert "of 28 turns, 0 found fewer tokens in its prefix cache than ours kept" in peer["notes"]
    chart = script(BENCHMARKS / "conversation_chart.py")
    sums = [line.get_ydata()[-1] for line in chart.picture(ours, peer).axes[0].lines[:1]]
    assert sums == [pytest.approx(ours["sums"]["demand"]["ttft_s"])]
    assert chart.asked(ours) == chart.asked(peer)
    peer["turns"][3]["asked"]["new_tokens"] += 1
    assert chart.asked(ours) != chart.asked(peer)
