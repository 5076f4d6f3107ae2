"""The profile's file, and what a machine's facts say will hold a user back."""

import json

import pytest
from machines import GIB, machine

from residency.policies.errors import ConfigError
from residency.runtime.machine.findings import findings
from residency.runtime.machine.measurement import (
    GATHER,
    GATHER_BUSY,
    LINK,
    LINK_BUSY,
    LINK_PAGEABLE,
)
from residency.runtime.machine.profile import (
    machine_path,
    read_machine,
    require_machine,
    write_machine,
)


def test_it_reads_back_as_it_was(tmp_path):
    profile = machine(failures={"pinning": "refused"})
    write_machine(tmp_path / "new" / "one.json", profile, "--out")
    again = read_machine(tmp_path / "new" / "one.json")
    assert again.measurements == profile.measurements
    assert json.dumps(again.as_dict()) == json.dumps(profile.as_dict())


DAMAGE = {
    "not JSON": lambda text: text[: len(text) // 2],
    "another version": lambda text: text.replace('"version": 1', '"version": 2'),
    "another kind": lambda text: text.replace('"kind": "machine"', '"kind": "bench"'),
    "no device": lambda text: text.replace("device_name", "devicename"),
    "a rate below 0": lambda text: text.replace('"least": 5', '"least": -5', 1),
    "a unit of its own": lambda text: text.replace("bytes/s", "furlongs", 1),
    "a list": lambda text: "[1]",
    "nothing": lambda text: "",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_none(tmp_path, name):
    file = tmp_path / "one.json"
    write_machine(file, machine(), "--out")
    file.write_text(DAMAGE[name](file.read_text()))
    assert read_machine(file) is None
    with pytest.raises(ConfigError, match="holds no machine profile"):
        require_machine(file, "--machine")


def test_a_missing_file_is_none(tmp_path):
    assert read_machine(tmp_path / "none.json") is None
    with pytest.raises(ConfigError, match="there is no such file"):
        require_machine(tmp_path / "none.json", "--machine")


def test_each_device_has_a_file_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = machine_path("NVIDIA GeForce RTX 3090 Ti")
    assert path == tmp_path / "residency/machine/nvidia-geforce-rtx-3090-ti.json"


def test_a_good_machine_has_no_findings():
    assert findings(machine()) == []


DOCTORED = {
    "pageable": (dict(failures={"pinned copies": "error 304"}), "cannot be pinned", "ulimit -l"),
    "quota": (dict(memlock_bytes=8 << 20), "may lock 0.0 GiB", "ulimit -l unlimited"),
    "lanes": (dict(pcie_lanes_now=4), "4 of 16 PCIe lanes", "slot"),
    "slow link": (dict(rates={LINK: 20e9}), "32% of PCIe 5 x16", "NUMA"),
    "far": (dict(near_cpus=8, gpu_numa_node=1), "8 of 16 CPUs", "numactl --cpunodebind=1"),
    "no graph": (dict(failures={"graph capture": "driver"}), "no graph", "update"),
    "no triton": (dict(triton=None), "triton", "pip install triton"),
    "group": (dict(cgroup_bytes=32 * GIB), "32.0 GiB of 128.0 GiB", "container"),
    "little memory": (dict(free_bytes=10 * GIB), "10.0 GiB of host memory", "quantised"),
    "few CPUs": (dict(cpus=4, near_cpus=4), "4 CPUs", "decode=gpu"),
    "old CPU": (dict(cpu_flags=("avx2",)), "no AVX-512", "hybrid"),
    "no bf16": (dict(cpu_flags=("avx2", "avx512f")), "AVX-512 with bf16", "hybrid"),
    "link shared": (dict(rates={LINK_BUSY: 20e9}), "20.0 beside a busy CPU", "bench"),
    "gather shared": (dict(rates={GATHER_BUSY: 20e9}), "the gather", "bench"),
    "WSL": (dict(wsl=True), "WSL", ".wslconfig"),
    "no compiler": (dict(library="no C++ compiler"), "no native library", "g++"),
    "versions": (dict(unsupported=("torch 1.0 (>=2 is supported)",)), "torch 1.0", "version"),
    "busy": (dict(load=12.0), "12.0 threads", "nothing else runs"),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_what_holds_back_is_named_with_its_figure_and_mend(name):
    changes, figure, mend = DOCTORED[name]
    (found,) = findings(machine(**changes))
    assert figure in str(found) and mend in found.mend
    assert len(str(found).splitlines()) == 1


def test_unsteady_repeats_are_named():
    profile = machine()
    text = json.dumps(profile.as_dict())
    doctored = json.loads(text)
    doctored["measurements"][0]["spread"]["least"] /= 10
    (found,) = findings(type(profile).from_dict(doctored))
    assert "repeats differ by 10." in found.what


def test_rates_come_by_the_first_name_that_was_measured():
    profile = machine({LINK: None})
    assert profile.rate(LINK, LINK_PAGEABLE) == 9e9
    assert profile.rate(LINK) is None
    assert profile.rate(GATHER) == 51e9
