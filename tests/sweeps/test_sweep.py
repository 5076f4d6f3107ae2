"""A 2 x 3 x 2 sweep: killed half-way, resumed, and what its folder then holds."""

import hashlib
import json
import os
import signal

import pytest
import torch
from command import assert_refused, residency
from sweeping import counts, results, started, tiny, wait_for

from residency.runtime.traces import read
from residency.sweeps.jobs import JobFolder, State
from residency.sweeps.locks import held, is_held
from residency.sweeps.manifest import Manifest

GRID = ("cache=lru,none", "cache.slots=6,12,16", "prefill=demand,always_stream")
JOBS = 7  # 3 of the 12 points cannot work, and 2 are another


def marks(folder):
    """What lies in the job folders, by name and content."""
    return {
        file: hashlib.sha256(file.read_bytes()).hexdigest()
        for job in results(folder)
        for file in (folder / job).iterdir()
    }


@pytest.fixture(scope="module")
def single_thread():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield patch


@pytest.fixture(scope="module")
def sweep(checkpoint, tmp_path_factory, single_thread):
    """Folder, what was whole when the sweep was killed, and what resuming it in a process that
    cannot open CUDA printed.
    """
    folder = tmp_path_factory.mktemp("sweep") / "s"
    process = started("sweep", *GRID, *tiny(checkpoint), "--out", folder)
    try:
        wait_for(lambda: len(results(folder)) >= 2 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        worker = wait_for(lambda: workers_of(process.pid))
        busy = residency("sweep", "--resume", folder)
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in worker), 10)
    before = marks(folder)

    def refuse(*args, **kwargs):
        raise AssertionError("the parent opened CUDA")

    single_thread.setattr(torch.cuda, "_lazy_init", refuse)
    return folder, before, busy, residency("sweep", "--resume", folder, "--json")


def workers_of(parent):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry))
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_second_sweep_in_the_folder_is_refused(sweep):
    assert_refused(sweep[2], "a sweep runs there already")


def test_resuming_runs_what_was_missing_and_leaves_the_rest(sweep):
    folder, before, _, resumed = sweep
    assert resumed.exit_code == 0, resumed.output
    told = json.loads(resumed.stdout)
    assert told["counts"] == {"done": JOBS, "failed": 0, "running": 0, "waiting": 0}
    assert sorted(results(folder), key=int) == [str(number) for number in range(JOBS)]
    assert 2 * 3 <= len(before) < JOBS * 3
    assert {file: mark for file, mark in marks(folder).items() if file in before} == before


def test_the_manifest_says_what_was_decided(sweep):
    written = json.loads((sweep[0] / "sweep.json").read_text())
    assert (written["version"], written["kind"]) == (1, "sweep")
    assert set(written) == {
        *("version", "kind", "overrides", "jobs", "skipped", "duplicates", "environment")
    }
    assert [job["number"] for job in written["jobs"]] == list(range(JOBS))
    assert written["jobs"][0]["title"] == "cache=lru cache.slots=6 prefill=demand"
    assert {job["group"] for job in written["jobs"]} == {0}
    assert [one["same_as"] for one in written["duplicates"]] == [6, 6]
    assert len(written["skipped"]) == 3
    for skipped in written["skipped"]:
        assert {"cache=none", "prefill=demand"} < set(skipped["overrides"])
        (reason,) = skipped["reasons"]
        assert set(reason) == {"keys", "reason", "mend"}
    assert json.loads(json.dumps(Manifest.read(sweep[0]).as_dict())) == written


def test_a_job_folder_is_what_bench_writes(sweep):
    for name, result in results(sweep[0]).items():
        folder = sweep[0] / name
        assert {file.name for file in folder.iterdir()} == {
            *("result.json", "config.yaml", "chart.png")
        }
        assert result["kind"] == "bench" and result["config"]["workload"]["lengths"] == [5, 12]
        assert JobFolder(folder).state is State.DONE


def test_routes_are_recorded_once(sweep):
    manifest = Manifest.read(sweep[0])
    assert {job.routes for job in manifest.jobs} == {"routes/0.safetensors"}
    trace = read(sweep[0] / "routes/0.safetensors", "")
    assert trace.num_tokens == 7 + 3


def test_a_sweep_that_is_there_or_is_none_is_refused(sweep, checkpoint, tmp_path):
    again = residency("sweep", *GRID, *tiny(checkpoint), "--out", sweep[0])
    assert_refused(again, "there is a sweep already", "--resume")
    assert_refused(residency("sweep", "--resume", tmp_path), "no sweep is there", "sweep.json")
    other = residency("sweep", "cache=lru", "--resume", sweep[0])
    assert_refused(other, "cache=lru", "only hydra/launcher")
    assert_refused(residency("sweep", "--resume", sweep[0], "--strict"), "--strict")
    assert_refused(residency("sweep", "--out", "a", "hydra.sweep.dir=b"), "says the same")


def test_a_resumed_sweep_with_nothing_left_starts_nothing(sweep):
    before = marks(sweep[0])
    told = residency("sweep", "--resume", sweep[0])
    assert told.exit_code == 0
    assert "residency report" in told.stdout
    assert marks(sweep[0]) == before


def test_ctrl_c_and_sigterm_end_a_sweep_and_name_how_to_resume(checkpoint, tmp_path):
    process = started("sweep", *GRID, *tiny(checkpoint), "--out", tmp_path / "s")
    wait_for(lambda: is_held(tmp_path / "s" / "0" / "running.json"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert f"residency sweep --resume {tmp_path / 's'} runs the others" in err
    assert not is_held(tmp_path / "s" / "0" / "running.json")


def test_jobs_do_not_depend_on_what_ran_before(tmp_path, single_thread, monkeypatch):
    """A job behind others in one worker, and alone in a fresh one: the worker before is killed,
    which fails its job in one line and no other.
    """
    from residency.sweeps.process import WorkerProcess

    shared = ("device=cpu", "device.threads=1", "cache.slots=50%")
    jobs = (
        "workload=generate,bench",
        "workload.max_new_tokens=6",
        "workload.lengths=[8]",
        "workload.decode_tokens=2",
        "workload.decode_context=8",
        "workload.repeats=1",
        "workload.warmups=0",
        "prefill=speculate,demand",
    )
    behind = residency("sweep", *shared, *reversed(jobs), "--out", tmp_path / "a", "--json")
    assert behind.exit_code == 0, behind.output
    run, number = WorkerProcess.run, []

    def killed_but_for_the_last(self, *args):
        number.append(self)
        if len(number) < 4:
            self._process.kill()
        return run(self, *args)

    monkeypatch.setattr(WorkerProcess, "run", killed_but_for_the_last)
    alone = residency("sweep", *shared, *reversed(jobs), "--out", tmp_path / "b", "--json")
    assert alone.exit_code == 1
    told = json.loads(alone.stdout)
    assert [job["state"] for job in told["jobs"]] == ["failed"] * 3 + ["done"]
    assert "SIGKILL" in told["jobs"][0]["error"]
    assert "3 of 4 jobs failed" in alone.stderr
    assert counts(results(tmp_path / "a")["3"]) == counts(results(tmp_path / "b")["3"])
    monkeypatch.undo()


def test_a_lock_ends_with_its_holder(tmp_path):
    with held(tmp_path / "l"):
        assert is_held(tmp_path / "l")
    assert not is_held(tmp_path / "l")
