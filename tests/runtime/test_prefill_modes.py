"""Prefill modes by turns: each begins in one state, the numbers add up, the files are whole."""

import json
import math
import re
from pathlib import Path

import pytest
from command import assert_refused, residency
from conftest import tiny_engine
from hypothesis import given
from hypothesis import strategies as st

from residency.conf import compose
from residency.conf.options import option_names, option_node
from residency.policies.errors import CapacityError, WorkloadError
from residency.runtime.bench.crossing import crossing
from residency.runtime.memory import MemoryPlan

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "result-format.md"
FEW = ("decode_tokens=3", "decode_context=7", "repeats=2", "warmups=0")
SHORT = ("workload=prefill_modes", *(f"workload.{text}" for text in (*FEW, "lengths=[16,4]")))
PNG = b"\x89PNG\r\n\x1a\n"
MODES = ["always_stream", "hit_d2d", "in_place", "demand", "speculate", "auto"]


def workload_of(*overrides):
    config = compose([*SHORT, *overrides])
    assert not list(config.conflicts())
    return config.measurement


@pytest.fixture(scope="module")
def workload():
    return workload_of("workload.prefix=[0,9]")


@pytest.fixture(scope="module")
def report(checkpoint, workload):
    with tiny_engine(checkpoint, "cache.slots=12") as engine:
        return workload.run(engine)


def test_each_panel_has_every_mode_at_every_length(report):
    panels = [(panel.prefix, panel.pool) for panel in report.panels]
    assert panels == [(0, "cold"), (0, "warm"), (9, "cold"), (9, "warm")]
    for panel in report.panels:
        assert [stage.tokens for stage in panel.stages] == [4, 16]
        for stage in panel.stages:
            assert list(stage.entries) == MODES
            assert all(len(entry.seconds) == 2 for entry in stage.entries.values())


def runs_of(stage, mode):
    return [run.totals for run in stage.entries[mode].point.samples.runs]


def test_every_turn_begins_in_the_state_of_its_pool(report):
    """Neither of these two modes changes what the slots hold while it runs."""
    for panel in report.panels:
        for stage in panel.stages:
            one, other = (runs_of(stage, mode) for mode in ("always_stream", "hit_d2d"))
            assert [run.hits for run in one] == [run.hits for run in other]
            assert all((run.hits > 0) is (panel.pool == "warm") for run in one)
            assert [run.lookups for run in one] == [run.lookups for run in runs_of(stage, "demand")]


def test_bytes_are_those_of_the_mode(report):
    row_bytes, bank_bytes = report.memory["row_bytes"], report.memory["bank_bytes"]
    for panel in report.panels:
        for stage in panel.stages:
            assert all(r.bytes["stream"] == bank_bytes for r in runs_of(stage, "always_stream"))
            for run in runs_of(stage, "hit_d2d"):
                assert run.bytes["stream"] + run.bytes["d2d"] == bank_bytes
                assert (run.bytes["d2d"] > 0) is (panel.pool == "warm")
            for run in runs_of(stage, "in_place"):
                assert run.bytes["d2d"] == 0
                assert (run.bytes["stream"] < bank_bytes) is (panel.pool == "warm")
            for run in runs_of(stage, "demand"):
                assert run.bytes["fetch"] == run.misses * row_bytes


def test_modes_take_turns(checkpoint):
    """Each chunk goes to all modes before the next is drawn, and none of it changes the engine."""
    workload = workload_of("workload.lengths=[4]", "workload.pools=[warm]", "workload.warmups=1")
    seen = []
    with tiny_engine(checkpoint, "cache.slots=12") as engine, pytest.MonkeyPatch.context() as patch:
        own, real = engine.policies, engine.generate_batch

        def generate_batch(prompts, **kwargs):
            seen.append((engine.policies.prefill.name, prompts[0]))
            return real(prompts, **kwargs)

        patch.setattr(engine, "generate_batch", generate_batch)
        patch.setattr("residency.runtime.bench.modes._resident", lambda *_: {0: nothing()})
        workload.run(engine)
        assert engine.policies == own
    turns = seen[1:]  # behind the conversation that fills the slots
    assert [name for name, _ in turns] == MODES * 3
    chunks = [chunk for _, chunk in turns]
    first, second = chunks[: len(MODES)], chunks[len(MODES) : 2 * len(MODES)]
    assert all(chunk == first[0] for chunk in first)
    assert all(chunk == second[0] for chunk in second)
    assert first[0] != second[0]


def nothing():
    from residency.runtime.bench.limits import Resident

    return Resident(reason="not measured")


def test_floors_and_ratios(report):
    for panel in report.panels:
        for stage in panel.stages:
            floors = [entry.point.floor for entry in stage.entries.values()]
            assert stage.least_floor_s == min(floor.own_s for floor in floors)
            waits = [entry.point.waits for entry in stage.entries.values()]
            assert waits[:4] == [False, False, False, True]
            fixed = [mode for mode in MODES if stage.entries[mode].fixed]
            assert fixed == MODES[:-1]
            assert min(stage.over_best_fixed(mode).least for mode in fixed) == 1
            own = stage.as_dict()["modes"]["demand"]
            assert own["over_own_floor"] * floors[MODES.index("demand")].own_s == pytest.approx(
                stage.entries["demand"].median_s
            )
    for found in report.resident.values():
        assert all(samples.hit_rate == 1 for samples in found.prefill)


def test_without_room_for_every_expert_there_is_a_reason(checkpoint, monkeypatch):
    check = MemoryPlan.check

    def refuse(plan, device, *, loaded=False):
        if loaded:
            raise CapacityError("device memory: too little")
        check(plan, device)

    monkeypatch.setattr(MemoryPlan, "check", refuse)
    workload = workload_of("workload.lengths=[4]", "workload.pools=[cold]", "workload.repeats=1")
    with tiny_engine(checkpoint, "cache.slots=12") as engine:
        report = workload.run(engine)
    result = json.loads(json.dumps(report.as_dict()))
    assert "too little" in result["limits"]["reason"]
    assert result["panels"][0]["points"][0]["least_floor_s"] is None
    (table,) = workload.tables(report)
    assert list(table.columns[-1].cells) == ["-"]


class Told:
    """As a runtime tells what a mode chose."""

    def __init__(self, choice, layers):
        self.choice, self.layers = choice, layers

    def as_dict(self):
        return {"num_tokens": 4, "choice": self.choice, "layers": self.layers, "reason": "cheap"}


def as_dicts(choices):
    return [choice.as_dict() for choice in choices]


def test_what_a_mode_chose_is_told(checkpoint, monkeypatch):
    """A mode that learns is no fixed one: others are its measure."""
    told = [Told("wait", 2), Told("stream", 1)]
    monkeypatch.setattr("residency.runtime.bench.modes.choices_of", lambda _: as_dicts(told))
    workload = workload_of("workload.lengths=[4]", "workload.pools=[cold]")
    workload.modes["demand"].learns = True
    with tiny_engine(checkpoint, "cache.slots=12") as engine:
        report = workload.run(engine)
    (stage,) = report.panels[0].stages
    entry = stage.entries["demand"]
    assert entry.layers_by_choice == {"wait": 4, "stream": 2} and not entry.fixed
    own = report.as_dict()["panels"][0]["points"][0]["modes"]["demand"]
    assert own["choices"][:2] == as_dicts(told) and not own["fixed"]
    others = [mode for mode in MODES if mode not in ("demand", "auto")]
    fastest = min(min(stage.entries[mode].seconds) for mode in others)
    assert stage.over_best_fixed("demand").least >= min(entry.seconds) / fastest / 2
    assert workload.chart(report).startswith(PNG)
    (table,) = workload.tables(report)
    assert "wait" in next(iter(list(table.columns)[1 + MODES.index("demand")].cells))


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(3.1, 8000), st.integers(1, 10))
def test_power_laws_cross_where_they_are_equal(slope, other_slope, at, count):
    """They are straight in the picture."""
    lengths = [8 << i for i in range(count + 1)]
    one, other = ([(n / at) ** s for n in lengths] for s in (slope, other_slope))
    met = crossing(lengths, one, other)
    if abs(slope - other_slope) < 1e-6:
        return
    if lengths[0] < at < lengths[-1]:
        assert math.isclose(met, at, rel_tol=1e-6)
    elif not lengths[0] <= at <= lengths[-1]:
        assert met is None


def test_lines_that_touch_cross_at_a_point_of_both():
    assert crossing([8, 16], [1, 2], [1, 3]) == pytest.approx(8)
    assert crossing([8, 16], [1, 2], [3, 2]) == pytest.approx(16)
    assert crossing([8], [1], [2]) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workload.lengths=[]", ("at least one length",)),
        ("workload.lengths=[0]", ("at least 1",)),
        ("workload.lengths=[5,5]", ("twice", "workload.lengths=[5]")),
        ("workload.pools=[tepid]", ("cold or warm",)),
        ("workload.pools=[cold,cold]", ("twice",)),
        ("workload.prefix=[3]", ("more than the 3 decoded",)),
        ("workload.prefix=[-1]", ("must be 0",)),
        ("workload.crossing=[demand,demand]", ("two of the modes", "workload.crossing=[]")),
        ("workload.crossing=[demand,lru]", ("always_stream, hit_d2d, in_place, demand",)),
        ("workload.repeats=0", ("at least 1",)),
        ("workload.modes=['demand max_tokens=0',always_stream]", ("prefill.max_tokens=0",)),
        ("workload.modes=['demand ring=2',always_stream]", ("one staging", "prefill.ring")),
        ("cache=none", ("hit_d2d", "retains none", "cache=lru")),
        ("decode=cpu", ("hit_d2d", "decode=gpu")),
    ],
)
def test_values_that_cannot_work_are_conflicts(override, words):
    told = " ".join(map(str, compose([*SHORT, "prefill=always_stream", override]).conflicts()))
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ("[demnd]", ("workload.modes=demnd", "did you mean demand?")),
        ("[demand max_token=3]", ("workload.modes, demand max_token=3", "no such key")),
        ("['demand 3']", ("workload.modes", "key=value")),
        ("['demand max_tokens=x']", ("max_tokens=x", "whole number")),
        ("['']", ("workload.modes=", "no such prefill")),
    ],
)
def test_modes_that_are_none_are_refused(modes, words):
    quoted = modes if "'" in modes else modes.replace("[", "['").replace("]", "']")
    assert_refused(residency("bench", *SHORT, f"workload.modes={quoted}"), *words)


def test_one_option_may_be_there_with_several_settings():
    texts = ["demand max_tokens=8", "demand max_tokens=64", "always_stream"]
    workload = workload_of(f"workload.modes={texts}", "workload.crossing=[]")
    assert list(workload.modes) == texts
    assert [mode.config.max_tokens for mode in list(workload.modes.values())[:2]] == [8, 64]


def test_every_prefill_mode_is_measured_unless_others_are_asked_for():
    names = [text.partition(" ")[0] for text in option_node("workload", "prefill_modes")["modes"]]
    assert sorted(names) == option_names("prefill")


def test_a_preset_brings_its_workload():
    shown = residency("bench", "experiment=next_turn_ttft", "workload.repeats=1", "--cfg").stdout
    assert "PrefillModes" in shown and "4096" in shown
    other = residency("bench", "experiment=nothing_stays", "workload.pool=warm", "--cfg")
    assert "bench.Bench" in other.stdout
    assert_refused(residency("run", "workload=prefill_modes"), "`residency bench` runs it")


def command(checkpoint, *args):
    model = ["model=folder", f"model.path={checkpoint}", "device=cpu", "cache.slots=12"]
    return residency("bench", "experiment=short_chunk_ttft", *SHORT[1:], *model, *args)


def test_the_command_writes_a_whole_folder(checkpoint, tmp_path):
    folder = tmp_path / "out"
    few = ("workload.lengths=[4]", "workload.repeats=1", "workload.pools=[cold]")
    result = command(checkpoint, *few, "--out", folder, "model.routing=even")
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout and "cross" in result.stdout and "routing: even" in result.stdout
    assert (folder / "chart.png").read_bytes().startswith(PNG)
    written = json.loads((folder / "result.json").read_text())
    assert (written["kind"], written["version"]) == ("prefill_modes", 1)
    assert written["config"]["workload"]["pools"] == ["cold"]
    assert (folder / "config.yaml").exists()
    assert_refused(command(checkpoint, "--out", folder), "result.json", "--force")


def test_chunks_longer_than_the_context_are_refused(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=12") as engine:
        for override, needed in (("lengths=[5,4096]", 4097), ("prefix=[4096]", 4113)):
            with pytest.raises(WorkloadError, match=f"context of {needed}"):
                workload_of(f"workload.{override}").run(engine)


def section(heading):
    """The text under a heading of the document."""
    found = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.M | re.S)
    return found[0]


def keys_of(text):
    cells = re.findall(r"^\| (`.*?) \|", text, flags=re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_document_names_the_same_keys(report):
    result = json.loads(json.dumps(report.as_dict() | {"config": {}}))
    own = section("A result.json of prefill modes")
    top, panel, entry = re.split(r"^(?:An entry of|A mode of).*$", own, flags=re.M)
    point = result["panels"][0]["points"][0]
    assert keys_of(top) == set(result)
    assert keys_of(panel) == set(result["panels"][0]) | set(point)
    others = set(point["modes"]["demand"]) - keys_of(entry)
    assert others <= keys_of(section("A bench's result.json"))
    assert keys_of(entry) <= set(point["modes"]["demand"])
