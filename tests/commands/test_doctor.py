"""`residency doctor`: what it prints, keeps and refuses; the probes have tests of their own."""

import json

import pytest
from command import assert_refused, residency

from residency.runtime.environment import environment
from residency.runtime.machine import facts, probes
from residency.runtime.machine.measurement import SECONDS, Measurement
from residency.runtime.machine.profile import machine_path, read_machine


def quick_probe(device, effort):
    yield Measurement.of("host turn", "made up", SECONDS, [1e-6, 2e-6])


def broken_probe(device, effort):
    raise RuntimeError("no such driver")
    yield


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = {"turns": quick_probe, "graph capture": broken_probe}
    monkeypatch.setattr(probes, "PROBES", chosen)
    monkeypatch.setattr(facts, "_library", lambda: "")  # the cache is new, and building takes long


def own_file():
    import torch

    return machine_path(environment(torch.device("cpu"))["device_name"])


def test_it_tells_what_was_measured_and_keeps_it(tmp_path):
    result = residency("doctor", "device=cpu", "--quick", "--out", tmp_path / "mine.json")
    assert result.exit_code == 0, result.output
    assert "host turn: 1.50 us" in result.stderr
    assert "graph capture: not measured: no such driver" in result.stdout
    assert str(own_file()) in result.stdout.replace("\n", "")
    for file in (own_file(), tmp_path / "mine.json"):
        kept = read_machine(file)
        assert list(kept.measurements) == ["host turn"]
        assert kept.failures == {"graph capture": "no such driver"}


def test_json_is_the_profile_with_its_findings():
    told = json.loads(residency("doctor", "device=cpu", "--json").stdout)
    assert told["kind"] == "machine" and told["measurements"][0]["name"] == "host turn"
    assert told["files"] == [str(own_file())]
    assert all({"what", "so", "mend"} == set(one) for one in told["findings"])


def test_what_it_cannot_do_is_refused(tmp_path):
    assert_refused(residency("doctor", "cache=lru"), "cache=lru", "device=...")
    assert_refused(residency("doctor", "device=cuda", "device.index=99"), "device.index=99")
    (tmp_path / "mine.json").write_text("mine")
    again = ("doctor", "device=cpu", "--out", tmp_path / "mine.json")
    assert_refused(residency(*again), "is there already", "--force")
    assert residency(*again, "--force").exit_code == 0
    missing = residency("doctor", "device=cpu", "--out", tmp_path / "no" / "mine.json")
    assert_refused(missing, "cannot be written")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert_refused(residency("doctor", "device=cpu", "--json"), "cannot be written", "--out")
    kept = residency("doctor", "device=cpu", "--out", tmp_path / "mine.json")
    assert kept.exit_code == 0 and read_machine(tmp_path / "mine.json") is not None
