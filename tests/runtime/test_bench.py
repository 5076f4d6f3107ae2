"""The bench: its numbers add up, its files are whole, and the engine is left as it was."""

import json

import pytest
import torch
from command import assert_refused, residency
from conftest import tiny_engine

from residency.conf import build_engine, compose
from residency.policies.errors import CapacityError, WorkloadError
from residency.runtime.bench.limits import Floor, cover, link_rate, resident
from residency.runtime.bench.measure import Meter
from residency.runtime.bench.samples import Spread
from residency.runtime.bench.tables import bench_tables
from residency.runtime.memory import MemoryPlan

NUM_IDS, NUM_EXPERTS = 24, 8
FEW = (
    "workload=bench",
    "workload.lengths=[5,20]",
    "workload.decode_tokens=3",
    "workload.decode_context=7",
    "workload.repeats=2",
)
PNG = b"\x89PNG\r\n\x1a\n"


def plan_of(*overrides):
    return compose([*FEW, *overrides]).workload


def bench(checkpoint, *overrides, told=None):
    policies = [text for text in overrides if not text.startswith("workload.")]
    with tiny_engine(checkpoint, *policies) as engine:
        own = [text for text in overrides if text.startswith("workload.")]
        return plan_of(*own).run(engine, told)


def test_every_kind_of_run_is_there(checkpoint):
    lines = []
    report = bench(checkpoint, "cache.slots=12", told=lines.append)
    assert [point.samples.tokens for point in report.prefill] == [5, 20]
    for point in report.prefill:
        assert len(point.samples.runs) == 2
        assert point.samples.device_s is None
        spread = point.samples.seconds
        assert 0 < spread.least <= spread.median <= spread.most
    assert [len(run.step_s) for run in report.decode.samples.runs] == [3, 3]
    assert len(lines) == 5
    json.dumps(report.as_dict())
    assert all(table.row_count for table in bench_tables(report))


def test_counters_by_layer_add_up_to_the_runs(checkpoint):
    report = bench(checkpoint, "cache.slots=12").as_dict()
    for entry, phase in [(report["decode"], "decode"), (report["prefill"][1], "prefill")]:
        assert [(row["layer"], row["phase"]) for row in entry["counters"]] == [
            (layer, phase) for layer in range(3)
        ]
        totals = [run["totals"] for run in entry["runs"]]
        for name in ("lookups", "hits", "misses", "evictions", "fetched"):
            assert sum(row[name] for row in entry["counters"]) == sum(t[name] for t in totals)
        moved = sum(row["bytes"]["fetch"] for row in entry["counters"])
        assert moved == sum(t["bytes"]["fetch"] for t in totals) > 0


def test_several_sequences_are_decoded_together(checkpoint):
    """A step is one for all of them; tokens a second count each one's."""
    config = compose(
        [
            *(*FEW, "workload.batch=3", "model=folder", f"model.path={checkpoint}"),
            *("model.routing=even", "device=cpu", "cache.slots=all"),
        ]
    )
    with build_engine(config) as engine:
        report = config.workload.run(engine)
    samples = report.decode.samples
    assert samples.batch == report.as_dict()["decode"]["batch"] == 3
    assert [len(run.step_s) for run in samples.runs] == [3, 3]
    for run in samples.runs:
        assert 9 / run.seconds in (samples.tokens_per_s.least, samples.tokens_per_s.most)
        assert run.totals.lookups > 3 * 3 * 2  # routes differ: more than one sequence's
    assert "a step of 3 sequences" in bench_tables(report)[1].columns[0].header


def test_a_cold_pool_misses_everything_and_a_warm_one_does_not(checkpoint):
    for pool, hits in (("cold", False), ("warm", True)):
        report = bench(checkpoint, "cache.slots=all", f"workload.pool={pool}")
        rate = report.prefill[0].samples.hit_rate
        assert (rate > 0) is hits


def test_demand_moves_what_it_missed(checkpoint):
    report = bench(checkpoint, "cache.slots=12", "prefill=demand", "decode=gpu")
    row_bytes = report.memory["row_bytes"]
    for point in report.prefill:
        assert point.waits
        misses = [run.totals.misses for run in point.samples.runs]
        assert point.samples.link_bytes == sum(misses) / len(misses) * row_bytes
        assert point.floor.own_s == point.floor.waits_s


def test_a_stream_s_floor_is_that_of_copies_that_run_ahead(checkpoint):
    report = bench(checkpoint, "prefill=always_stream")
    for point in report.prefill:
        assert not point.waits
        assert point.samples.link_bytes == report.memory["bank_bytes"]
        assert point.floor.own_s == point.floor.ahead_s
        assert point.floor.link_s == pytest.approx(report.whole_stream_s)


def test_all_resident_runs_miss_nothing(checkpoint):
    report = bench(checkpoint, "cache.slots=4", "model.routing=even")
    assert report.resident.reason == ""
    assert all(samples.hit_rate == 1 for samples in report.resident.prefill)
    assert report.resident.decode.hit_rate == 1
    assert report.decode.floor.compute_s == report.resident.decode_s


def test_a_decode_on_the_host_has_no_floor_of_the_link(checkpoint):
    report = bench(checkpoint, "decode=cpu")
    assert report.decode.floor is None
    assert report.prefill[0].floor is not None


def test_without_room_for_every_expert_there_is_a_reason(checkpoint, monkeypatch):
    check = MemoryPlan.check

    def refuse(plan, device, *, loaded=False):
        if loaded:
            raise CapacityError("device memory: too little")
        check(plan, device)

    monkeypatch.setattr(MemoryPlan, "check", refuse)
    report = bench(checkpoint, "cache.slots=4")
    assert "too little" in report.resident.reason
    assert report.prefill[0].floor is None and report.decode.floor is None
    json.dumps(report.as_dict())


def test_the_engine_is_as_before_a_reconfiguration(checkpoint):
    other = compose(["cache=lru", "cache.slots=all", "prefill=always_stream"]).policies
    prompt = list(range(3, 20))
    with tiny_engine(checkpoint, "cache.slots=5") as engine:
        old, banks = engine.policies, engine.banks
        before = engine.generate(prompt, max_new_tokens=4, ignore_eos=True)
        with engine.reconfigured(other):
            assert engine.runtime.pool.num_slots == NUM_IDS
            assert engine.runtime.banks is banks
            inside = engine.generate(prompt, max_new_tokens=4, ignore_eos=True)
            assert inside.token_ids == before.token_ids
            assert inside.phases[0].bytes["stream"] > 0
        assert engine.policies is old and engine.runtime.pool.num_slots == 5
        assert (engine.runtime.pool.slot_of < 0).all()
        after = engine.generate(prompt, max_new_tokens=4, ignore_eos=True)
        assert after.counters == before.counters


def test_the_engine_survives_a_reconfiguration_that_fails(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=5") as engine:
        with pytest.raises(ZeroDivisionError), engine.reconfigured(engine.policies):
            raise ZeroDivisionError
        engine.generate([3, 4, 5], max_new_tokens=2, ignore_eos=True)
        assert engine.runtime.pool.num_slots == 5


def test_cover_visits_every_expert(checkpoint):
    with tiny_engine(checkpoint) as engine:
        space = engine.architecture.space
        table = cover(space, torch.device("cpu")).table_NLK
        for layer in range(space.num_layers):
            assert len(table[:, layer].unique()) == space.num_experts
        everything = resident(engine, Meter(engine, plan_of().plan))
        assert everything.decode.hit_rate == 1


def test_the_link_is_measured_beside_the_slots(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=8") as engine:
        engine.generate([3, 4, 5], max_new_tokens=2)
        slots = engine.runtime.rows[:8].clone()
        rate = link_rate(engine, 3)
        assert torch.equal(engine.runtime.rows[:8], slots)
        assert 0 < rate.rate.least <= rate.rate.most
        assert not rate.pinned


def test_floors():
    """Link 4, compute 3, first group 1."""
    assert Floor.of(4, 3, 1, waits=True) == Floor(4, 3, 7, 5, 7)
    assert Floor.of(4, 3, 1, waits=False).own_s == 5
    assert Floor.of(0, 3, 1, waits=False).own_s == 3  # nothing moves: no first group either
    assert Spread.of([3, 1, 2]) == Spread(2, 1, 3)


def test_prompts_longer_than_the_context_are_refused(checkpoint):
    with tiny_engine(checkpoint) as engine, pytest.raises(WorkloadError, match="context of 4097"):
        plan_of("workload.lengths=[5,4096]").run(engine)


@pytest.mark.parametrize(
    "override",
    [
        "workload.lengths=[]",
        "workload.lengths=[0]",
        "workload.lengths=[5,5]",
        "workload.decode_tokens=0",
        "workload.decode_context=0",
        "workload.batch=0",
        "workload.repeats=0",
        "workload.warmups=-1",
        "workload.pool=lukewarm",
        "workload.seed=-1",
    ],
)
def test_values_that_cannot_work_are_conflicts(override):
    (conflict,) = compose([*FEW, override]).conflicts()
    assert conflict.keys[0].replace(" ", "") == override


def command(checkpoint, *args):
    model = ["model=folder", f"model.path={checkpoint}", "device=cpu"]
    return residency("bench", *FEW[1:], *model, *args)


def test_the_command_writes_a_whole_folder(checkpoint, tmp_path):
    folder = tmp_path / "out"
    result = command(checkpoint, "--out", folder, "model.routing=even", "cache.slots=6")
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout and "routing: even" in result.stdout
    assert sorted(file.name for file in folder.iterdir()) == [
        "chart.png",
        "config.yaml",
        "result.json",
    ]
    assert (folder / "chart.png").read_bytes().startswith(PNG)
    written = json.loads((folder / "result.json").read_text())
    assert written["kind"] == "bench" and not written["made_up_weights"]
    assert written["config"]["model"]["routing"] == "even"
    assert written["config"]["cache"]["slots"] == 6
    assert_refused(command(checkpoint, "--out", folder), "result.json", "--force")


def test_an_interrupted_bench_writes_nothing(checkpoint, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("residency.runtime.bench.run.resident", interrupt)
    result = command(checkpoint, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_json_is_one_object(checkpoint):
    result = command(checkpoint, "--json")
    assert json.loads(result.stdout)["kind"] == "bench"


def test_each_command_runs_its_own_workload(checkpoint):
    assert_refused(residency("run", "workload=bench"), "workload=bench", "generate")
    assert_refused(residency("bench", "workload=generate"), "workload=generate", "bench")
