"""Turns on a GPU, without one: names and locks."""

import subprocess
import sys

import pytest

from residency.sweeps import turns

UUIDS = {"0": "GPU-a", "1": "GPU-b"}


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [(None, 1, "GPU-b"), ("1,0", 0, "GPU-b"), ("GPU-b", 0, "GPU-b"), ("7", 0, "7")],
)
def test_processes_that_see_other_gpus_agree_on_names(monkeypatch, visible, index, name):
    monkeypatch.setattr(turns, "_uuids", lambda: UUIDS)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert turns.gpu_name(index) == name


def test_a_turn_waits_until_the_holder_is_gone(monkeypatch, tmp_path):
    monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(turns, "gpu_name", lambda index: f"GPU-{index}")
    code = """
import sys
from pathlib import Path
from residency.sweeps.locks import take
print(take(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code, turns.lock_file("GPU-0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "True\n"
    told = []

    def end_the_holder(line):
        told.append(line)
        holder.kill()
        holder.communicate()

    turns.take_turn(1, told.append)
    assert not told, "another GPU is free"
    turns.take_turn(0, end_the_holder)
    assert told == ["waits for its turn on GPU GPU-0"]
