"""What folders hold is told apart: measured, failed, running, to run, damaged, foreign."""

import json

import made_results
import pytest
from command import assert_refused, residency
from made_results import bench, write, write_sweep

from residency.policies.errors import ConfigError
from residency.reports.reading import State, read_folders

GOOD = bench({4: [0.1, 0.2]}, [0.1, 0.2])


def changed(**more):
    return GOOD | more


DAMAGE = {
    "not JSON": ("{", "not JSON"),
    "not text": ("\x00", "not JSON"),
    "a list": ("[1]", "not an object"),
    "nested": ("[" * 100_000, "not JSON"),
    "another version": (changed(version=9), "/version is 9, not 1"),
    "another kind": (changed(kind="flights"), "its kind is 'flights'"),
    "no prefill": ({k: v for k, v in GOOD.items() if k != "prefill"}, "/prefill is missing"),
    "a text for a list": (changed(prefill="x"), '/prefill is "x", not a list'),
    "a time of zero": (
        changed(prefill=[made_results.entry(4, "ttft_s", [0, 1])]),
        "/prefill/0/ttft_s/least is 0, not a time above 0",
    ),
    "no number": (json.dumps(GOOD).replace('"least": 0.1', '"least": NaN'), "NaN is not a number"),
    "a flag for a number": (
        changed(prefill=[GOOD["prefill"][0] | {"tokens": True}]),
        "/prefill/0/tokens is true, not a number",
    ),
    "a spread that is none": (
        changed(decode=GOOD["decode"] | {"tpot_s": {"median": 3, "least": 4, "most": 5}}),
        "/decode/tpot_s is",
    ),
    "notes of another form": (changed(notes={"a": 1}), "/notes is"),
    "an environment of another form": (changed(environment={"cpus": 2}), "/environment/cpus is 2"),
}


@pytest.mark.parametrize(("content", "what"), DAMAGE.values(), ids=DAMAGE)
def test_a_result_that_cannot_be_shown_is_one_line(content, what, tmp_path):
    folder = write(tmp_path / "run", content)
    assert_refused(residency("report", folder), folder / "result.json", what)
    assert not (folder / "report").exists()


@pytest.mark.parametrize(("content", "what"), DAMAGE.values(), ids=DAMAGE)
def test_among_others_it_is_left_out_and_named(content, what, tmp_path):
    write(tmp_path / "bad", content)
    write(tmp_path / "good", GOOD)
    found = read_folders([tmp_path])
    assert [job.folder.name for job in found.jobs] == ["good"]
    (line,) = found.left_out
    assert what in line and "bad" in line


@pytest.mark.parametrize(("content", "what"), DAMAGE.values(), ids=DAMAGE)
def test_in_a_sweep_it_is_a_damaged_job(content, what, tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [("cache=lru", {}), ("cache=lfu", {})])
    write(sweep / "0", GOOD)
    write(sweep / "1", content)
    found = read_folders([sweep])
    assert [job.state for job in found.jobs] == [State.DONE, State.DAMAGED]
    assert what in found.jobs[1].error


def test_a_config_that_is_damaged_is_named(tmp_path):
    folder = write(tmp_path / "run", {k: v for k, v in GOOD.items() if k != "config"})
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"config\.yaml: damaged"):
        read_folders([folder])


def test_each_state_of_a_job_is_told(tmp_path):
    failure = {"version": 1, "kind": "failure", "error": "it broke", "detail": "Traceback"}
    jobs = [
        ("a=0", {"result.json": GOOD, "failure.json": failure}),
        ("a=1", {"failure.json": failure, "running.json": {}}),
        ("a=2", {"running.json": {}}),
        ("a=3", {}),
    ]
    found = read_folders([write_sweep(tmp_path / "s", jobs)])
    states = [job.state for job in found.jobs]
    assert states == [State.DONE, State.FAILED, State.RUNNING, State.WAITING]
    assert [job.error for job in found.jobs] == ["", "it broke", "", ""]


@pytest.mark.parametrize("key", ["folder", "routes"])
def test_a_sweep_that_leads_out_of_its_folder_is_refused(key, tmp_path):
    sweep = write_sweep(tmp_path / "s", [("a=0", {"result.json": GOOD})])
    tree = json.loads((sweep / "sweep.json").read_text())
    tree["jobs"][0][key] = "../elsewhere"
    (sweep / "sweep.json").write_text(json.dumps(tree))
    assert_refused(residency("report", sweep), f"/jobs/0/{key}", "within the sweep's folder")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"version": 1}', '{"version": 2, "kind": "sweep"}']
)
def test_a_damaged_sweep_is_one_line(content, tmp_path):
    (tmp_path / "sweep.json").write_text(content)
    assert_refused(residency("report", tmp_path), tmp_path / "sweep.json")


def test_nothing_to_report_on_is_one_line(tmp_path):
    assert_refused(residency("report", tmp_path / "none"), "there is no such folder")
    assert_refused(residency("report", tmp_path), "neither a result.json nor a sweep.json")
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_several_sweeps_have_numbers_of_their_own(tmp_path):
    for name in "ab":
        write_sweep(tmp_path / name, [("a=0", {"result.json": GOOD})])
    found = read_folders([tmp_path / "a", tmp_path / "b"])
    assert [job.number for job in found.jobs] == ["0", "1"]
    below = read_folders([tmp_path])
    assert [job.folder for job in below.jobs] == [job.folder for job in found.jobs]
