"""Signals: whatever ends a process, and wherever, it ends in one line and no file is half there."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command import assert_one_line, assert_refused, residency

from residency.runtime.faults import Point, armed
from residency.runtime.interrupts import Terminated, held_back, termination
from residency.runtime.results import RESULT_NAME, ResultFolder, write_whole
from residency.runtime.shards import Shards

RUN = ("run", "device=cpu", "workload.max_new_tokens=9")
BENCH = (
    *("bench", "device=cpu", "workload.lengths=[16]", "workload.decode_tokens=4"),
    *("workload.repeats=1", "workload.warmups=0"),
)
ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


@pytest.fixture(autouse=True)
def heard():
    """As a shell starts a command: what runs in its background is deaf to ctrl-C, and libraries
    that other tests use leave handlers behind.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def sends(number, at):
    """A real signal to this process, at the nth time."""
    calls = iter(range(1, 1 << 30))

    def action(*_):
        if next(calls) == at:
            os.kill(os.getpid(), number)

    return action


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
@pytest.mark.parametrize("stage", ["load", Point.PREFILL, Point.DECODE])
@pytest.mark.parametrize("command", [RUN, BENCH], ids=lambda command: command[0])
def test_a_signal_ends_a_command_in_one_line(tmp_path, monkeypatch, command, stage, number):
    if stage == "load":  # comes while another thread reads a shard
        read, send = Shards.read, sends(number, at=9)
        monkeypatch.setattr(Shards, "read", lambda *args: (send(), read(*args))[1])
        result = residency(*command, "--out", tmp_path)
    else:
        with armed(stage, sends(number, at=1)):
            result = residency(*command, "--out", tmp_path)
    status, word = ENDS[number]
    assert result.exit_code == status, result.output
    # A pseudo-terminal's progress bar is no part of it; here there is none.
    assert_one_line(result.stderr.splitlines()[-1], word, "no file was left half written")
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "put back"


def test_who_started_us_may_have_sigterm_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with termination():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_a_signal_between_two_renames_waits_for_both(tmp_path, monkeypatch, number):
    files = {tmp_path / name: b"new" for name in ("a", "b")}
    write_whole({file: b"old" for file in files}, "--out")
    replace, send = os.replace, sends(number, at=1)
    monkeypatch.setattr(os, "replace", lambda *pair: (replace(*pair), send())[0])
    with pytest.raises(KeyboardInterrupt), termination():
        write_whole(files, "--out")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "a": b"new",
        "b": b"new",
    }


def test_what_is_held_back_comes_afterwards():
    done = []
    with pytest.raises(Terminated), termination():
        with held_back():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("inside")
        done.append("behind")  # pragma: no cover
    assert done == ["inside"]


# Real processes.


def python(text, *args, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_real_sigterm_ends_the_process(tmp_path):
    text = """
        import os, signal, sys
        from residency.cli import main
        from residency.runtime.faults import Point, armed
        with armed(Point.DECODE, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            main()
    """
    with python(text, *RUN, "--out", tmp_path) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert_one_line(errors, "terminated")
    assert not list(tmp_path.iterdir())


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from residency.runtime.results import ResultFolder
    folder = ResultFolder(Path(sys.argv[1]), force=True)
    calls, real = [], getattr(os, sys.argv[2])
    def killed(*args):
        calls.append(args)
        if len(calls) == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    setattr(os, sys.argv[2], killed)
    folder.write({"of": "a process that was killed"}, "x: 1", {"chart.png": b"0" * 99})
"""


@pytest.mark.parametrize(("call", "at"), [("fsync", 1), ("fsync", 3), ("replace", 1)])
def test_after_sigkill_a_later_run_finds_nothing_in_its_way(tmp_path, call, at):
    (tmp_path / RESULT_NAME).write_text('{"of": "before"}')
    with python(KILLED, tmp_path, call, at) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / RESULT_NAME).read_text() == '{"of": "before"}'
    left = {file.name for file in tmp_path.iterdir()} - {RESULT_NAME}
    assert left and all(re.fullmatch(r"\..*\.partial", name) for name in left)
    ResultFolder(tmp_path, force=True).write({"of": "after"}, "x: 2")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", RESULT_NAME]


def test_one_of_two_processes_has_a_folder_and_the_other_is_refused_before_its_work(
    tmp_path, monkeypatch
):
    text = """
        import sys
        from pathlib import Path
        from residency.runtime.results import ResultFolder
        folder = ResultFolder(Path(sys.argv[1]))
        print("mine", flush=True)
        sys.stdin.read()
    """
    monkeypatch.setattr("residency.conf.build_engine", lambda *_: pytest.fail("it has begun"))
    with python(text, tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "mine\n"
        refused = residency(*RUN, "--out", tmp_path, "--force")
        assert_refused(refused, f"--out {tmp_path}: another run is writing there now")
        process.kill()  # no lock outlives its process
    monkeypatch.undo()
    assert residency(*RUN, "--out", tmp_path).exit_code == 0


def test_a_temporary_that_is_being_written_is_left_to_its_writer(tmp_path, monkeypatch):
    inner = []

    def during(*args):
        if not inner:
            inner.append(True)
            write_whole({tmp_path / "other": b"2"}, "--out")
        return fsync(*args)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", during)
    write_whole({tmp_path / "one": b"1"}, "--out")
    assert {file.name for file in tmp_path.iterdir()} == {"one", "other"}


def test_a_folder_may_be_written_again_by_the_same_process(tmp_path):
    for number in range(3):
        ResultFolder(tmp_path, force=True).write({"number": number}, "x: 1")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(50):
        ResultFolder(tmp_path, force=True)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before
