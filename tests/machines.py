"""A machine profile that was never measured."""

from residency.runtime.bench.samples import Spread
from residency.runtime.machine.facts import Facts
from residency.runtime.machine.measurement import (
    BYTES_S,
    CHUNK_LAYER,
    DECODE_LAYER,
    DEVICE_COPY,
    GATHER,
    GATHER_BUSY,
    GATHER_ONE,
    GEMM_BF16,
    GEMM_FP32,
    HOST_TURN,
    LINK,
    LINK_BUSY,
    LINK_PAGEABLE,
    OPERATIONS_S,
    SECONDS,
    Measurement,
    host_experts,
)
from residency.runtime.machine.profile import MachineProfile

GIB = 1 << 30
H200 = {
    LINK: 55e9,
    LINK_BUSY: 54e9,
    LINK_PAGEABLE: 9e9,
    GATHER: 51e9,
    GATHER_ONE: 40e9,
    GATHER_BUSY: 49e9,
    DEVICE_COPY: 2.1e12,
    GEMM_BF16: 780e12,
    GEMM_FP32: 50e12,
    HOST_TURN: 30e-6,
    CHUNK_LAYER: 1e-3,
    DECODE_LAYER: 40e-6,
} | {host_experts(f, beside=b): 60e9 for f in ("bf16", "fp32", "nvfp4") for b in (False, True)}
UNITS = {GEMM_BF16: OPERATIONS_S, GEMM_FP32: OPERATIONS_S}
UNITS |= {name: SECONDS for name in (HOST_TURN, CHUNK_LAYER, DECODE_LAYER)}


def facts(**changes):
    usual = dict(
        device_type="cuda",
        cpus=16,
        cpu_flags=("avx2", "avx512f", "avx512_bf16"),
        memory_bytes=128 * GIB,
        free_bytes=120 * GIB,
        cgroup_bytes=None,
        memlock_bytes=None,
        huge_pages="always [madvise] never",
        wsl=False,
        numa_nodes=1,
        library="",
        triton="3.6.0",
        unsupported=(),
        driver="580.1",
        gpu_bytes=140 * GIB,
        gpu_free_bytes=139 * GIB,
        gpu_numa_node=0,
        near_cpus=16,
        pcie_generation=5,
        pcie_lanes=16,
        pcie_lanes_now=16,
    )
    return Facts(**(usual | changes))


def machine(rates=None, *, device="cuda:0", name="NVIDIA H200", failures=None, **changes):
    values = H200 | (rates or {})
    measured = {
        key: Measurement(key, "made up", UNITS.get(key, BYTES_S), Spread(v, v * 0.99, v * 1.01), 3)
        for key, v in values.items()
        if v is not None
    }
    environment = {"device": device, "device_name": name, "torch": "2.11.0"}
    told = facts(**changes).as_dict()
    return MachineProfile("2026-11-30T00:00:00+00:00", environment, measured, told, failures or {})
