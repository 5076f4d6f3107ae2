"""Findings: what will hold a user back, each with its figure, what follows and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from residency.runtime.machine.facts import Facts
from residency.runtime.machine.measurement import (
    GATHER,
    GATHER_BUSY,
    LINK,
    LINK_BUSY,
    LINK_PAGEABLE,
)
from residency.runtime.machine.profile import MachineProfile

GIB = 1 << 30
LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
USUAL_SHARE = 0.75  # of a PCIe link's raw rate that large copies reach at least
BUSY_SHARE = 0.8  # of a rate that is left beside a busy CPU on a machine with memory to spare
BUSY_LOAD = 0.5  # of the CPUs, wanted by others
UNSTEADY = 2.0  # the most of repeats over the least
FEW_CPUS = 8
LITTLE_MEMORY = 32 * GIB


@dataclass(frozen=True)
class Finding:
    """what: the figure. so: what follows. mend: what to do about it."""

    what: str
    so: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}: {self.so}; {self.mend}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def findings(profile: MachineProfile) -> list[Finding]:
    """The worst first, about."""
    try:
        facts = Facts.from_dict(dict(profile.facts))
    except TypeError:
        return []
    on_gpu = _gpu_findings(facts, profile) if facts.device_type == "cuda" else iter(())
    return [*on_gpu, *_host_findings(facts, profile), *_library_findings(facts)]


def _gpu_findings(facts: Facts, profile: MachineProfile) -> Iterator[Finding]:
    link, pageable = profile.rate(LINK), profile.rate(LINK_PAGEABLE)
    if (reason := profile.failures.get("pinned copies")) is not None:
        slower = f", {pageable / 1e9:.1f} GB/s" if pageable else ""
        so = f"experts cross the link from pageable memory{slower}, and no kernel can read them"
        yield Finding(f"host memory cannot be pinned ({reason})", so, "raise `ulimit -l`")
    elif facts.memlock_bytes is not None and facts.memlock_bytes < facts.memory_bytes // 2:
        what = f"a process may lock {facts.memlock_bytes / GIB:.1f} GiB"
        so = "where the driver heeds the limit, larger models cannot be pinned"
        yield Finding(what, so, "`ulimit -l unlimited`, or memlock in limits.conf")
    if facts.pcie_lanes and facts.pcie_lanes_now and facts.pcie_lanes_now < facts.pcie_lanes:
        what = f"the GPU runs on {facts.pcie_lanes_now} of {facts.pcie_lanes} PCIe lanes"
        so = "everything that streams takes as many times longer"
        yield Finding(what, so, "put it into a slot with all lanes, without a riser or splitter")
    raw = LANE_BYTES_S.get(facts.pcie_generation or 0, 0) * (facts.pcie_lanes_now or 0)
    if link and link < USUAL_SHARE * raw:
        what = (
            f"pinned copies reach {link / 1e9:.1f} GB/s, {link / raw:.0%} of PCIe "
            f"{facts.pcie_generation} x{facts.pcie_lanes_now}"
        )
        so = f"streams could be {USUAL_SHARE * raw / link:.1f} times faster"
        yield Finding(what, so, "look for another GPU's traffic, power saving, or a far NUMA node")
    if facts.near_cpus is not None and facts.near_cpus < facts.cpus:
        far = facts.cpus - facts.near_cpus
        what = f"{far} of {facts.cpus} CPUs are on another NUMA node than the GPU"
        so = "banks may lie in far memory, and experts on the host compute there"
        mend = f"start with `numactl --cpunodebind={facts.gpu_numa_node} "
        yield Finding(what, so, f"{mend}--membind={facts.gpu_numa_node}` if that memory suffices")
    if "graph capture" in profile.failures:
        reason = profile.failures["graph capture"]
        yield Finding(
            f"no graph could be captured ({reason})",
            "a decode step launches every kernel from Python, several times slower",
            "update the driver and torch",
        )
    for name, busy, what in ((LINK, LINK_BUSY, "copies"), (GATHER, GATHER_BUSY, "the gather")):
        alone, beside = profile.rate(name), profile.rate(busy)
        if alone and beside and beside < BUSY_SHARE * alone:
            figure = f"{what}: {alone / 1e9:.1f} GB/s, and {beside / 1e9:.1f} beside a busy CPU"
            so = "both want the same memory, so decode=hybrid gains less than the two rates say"
            yield Finding(figure, so, "more memory channels; compare hybrid and gpu by `bench`")
    if facts.triton is None:
        yield Finding(
            "triton is not installed",
            "experts are computed in plain torch and decode is no graph",
            "pip install triton",
        )


def _host_findings(facts: Facts, profile: MachineProfile) -> Iterator[Finding]:
    if facts.load > BUSY_LOAD * facts.cpus:
        what = f"{facts.load:.1f} threads wanted the {facts.cpus} CPUs before anything was measured"
        so = "rates here are lower than the machine's, and so is what is planned by them"
        yield Finding(what, so, "measure again when nothing else runs")
    ratios = {n: m.spread.most / m.spread.least for n, m in profile.measurements.items()}
    worst = max(ratios, key=lambda n: ratios[n], default=None)
    if worst is not None and ratios[worst] > UNSTEADY:
        what = f"{worst}: repeats differ by {ratios[worst]:.1f} times"
        yield Finding(what, "what is planned by it is as uncertain", "measure again, idle")
    if facts.cgroup_bytes is not None:
        what = (
            f"the control group allows {facts.cgroup_bytes / GIB:.1f} GiB of "
            f"{facts.memory_bytes / GIB:.1f} GiB of memory"
        )
        yield Finding(what, "banks beyond it end the process", "raise the container's limit")
    if facts.free_bytes < LITTLE_MEMORY:
        what = f"{facts.free_bytes / GIB:.1f} GiB of host memory are free"
        so = "all experts of a model must fit there: 30B in bf16 takes 54 GiB, in 4 bits 16 GiB"
        yield Finding(what, so, "close what else runs, or choose a smaller or quantised model")
    if facts.cpus < FEW_CPUS:
        so = "one is Python's, and the others compute experts: decode=cpu and hybrid gain little"
        if facts.device_type == "cpu":
            so = "they compute everything"
        yield Finding(f"{facts.cpus} CPUs", so, "more of them, or a GPU and decode=gpu")
    if "avx2" in facts.cpu_flags and "avx512_bf16" not in facts.cpu_flags:
        missing = "AVX-512" if "avx512f" not in facts.cpu_flags else "AVX-512 with bf16"
        so = "experts on the host convert every weight first"
        yield Finding(f"the CPU has no {missing}", so, "expect less of decode=cpu and hybrid")
    if facts.wsl:
        so = "pinned memory is limited to about half of what WSL has"
        yield Finding("this is WSL", so, "raise memory= in .wslconfig, or run Linux itself")


def _library_findings(facts: Facts) -> Iterator[Finding]:
    if facts.library:
        so = f"experts on the host are computed by torch, several times slower ({facts.library})"
        yield Finding("no native library for experts on the host", so, "install g++ or clang++")
    for package in facts.unsupported:
        so = "this project is not tested with it"
        yield Finding(f"{package}", so, "install a version within")
