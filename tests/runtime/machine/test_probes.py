"""What is measured here is plausible, and no probe stops the others."""

import pytest
import torch

from residency.policies.errors import CapacityError
from residency.runtime.machine import probes, sizes
from residency.runtime.machine.busy import busy_cpu
from residency.runtime.machine.facts import facts_of, generation_of, unsupported
from residency.runtime.machine.measurement import (
    BYTES_S,
    CHUNK_LAYER,
    DECODE_LAYER,
    DEVICE_COPY,
    GATHER,
    GATHER_BUSY,
    GATHER_EIGHT,
    GATHER_ONE,
    GEMM_BF16,
    GEMM_FP32,
    HOST_READ,
    HOST_TURN,
    LINK,
    LINK_BUSY,
    LINK_PAGEABLE,
    OPERATIONS_S,
    SECONDS,
    Measurement,
    host_experts,
)
from residency.runtime.machine.tables import machine_table

CPU = torch.device("cpu")
PLAUSIBLE = {BYTES_S: (1e6, 1e12), OPERATIONS_S: (1e8, 1e14), SECONDS: (1e-8, 60)}
EXPECTED = {
    *(LINK, LINK_BUSY, LINK_PAGEABLE, GATHER_ONE, GATHER_EIGHT, GATHER, GATHER_BUSY),
    *(DEVICE_COPY, GEMM_BF16, GEMM_FP32, HOST_READ, HOST_TURN, CHUNK_LAYER, DECODE_LAYER),
    *(
        host_experts(form, beside=beside)
        for form in ("bf16", "fp8_block", "nvfp4", "mxfp4")
        for beside in (False, True)
    ),
}


@pytest.fixture(scope="module")
def measured():
    """With little memory and few repeats, since speed is not judged here."""
    effort = sizes.Effort(2, 16 << 20, 4 << 20, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes.Effort, "of", classmethod(lambda cls, device, *, quick: effort))
        heard = []
        return probes.examine(CPU, heard.append, quick=True), heard


def test_everything_that_has_a_meaning_here_is_measured(measured):
    profile, heard = measured
    assert profile.failures == {}
    assert set(profile.measurements) == EXPECTED
    assert [one.name for one in heard] == list(profile.measurements)


def test_what_is_measured_is_plausible(measured):
    for one in measured[0].measurements.values():
        least, most = PLAUSIBLE[one.unit]
        assert least < one.spread.least <= one.value <= one.spread.most < most, one
        assert one.repeats >= 2 and one.what


def test_every_measurement_is_in_the_table(measured):
    table = machine_table(measured[0])
    assert table.row_count == len(EXPECTED)


def test_a_probe_that_fails_is_a_line_and_stops_no_other():
    def broken(device, effort):
        yield Measurement.of("first", "", SECONDS, [1.0])
        raise RuntimeError("CUDA error:\nno such thing")

    def refused(device, effort):
        raise CapacityError("host memory cannot be pinned")
        yield

    def sound(device, effort):
        yield Measurement.of("last", "", SECONDS, [2.0])

    heard = []
    chosen = {"broken": broken, "refused": refused, "sound": sound}
    profile = probes.examine(CPU, heard.append, probes=chosen)
    assert list(profile.measurements) == ["first", "last"]
    assert profile.failures == {
        "broken": "CUDA error: no such thing",
        "refused": "host memory cannot be pinned",
    }
    assert next(one for one in heard if isinstance(one, str)).startswith("broken: not measured")


def test_probes_take_a_part_of_the_memory_there_is(monkeypatch):
    monkeypatch.setattr(sizes, "free_host_bytes", lambda: 1 << 30)
    for quick in (True, False):
        effort = sizes.Effort.of(CPU, quick=quick)
        assert max(effort.bank_bytes, effort.device_bytes) <= (1 << 30) // sizes.HOST_SHARE
    full, quick = (sizes.Effort.of(CPU, quick=q) for q in (False, True))
    assert quick.bank_bytes <= full.bank_bytes and quick.side < full.side


def test_a_busy_cpu_is_idle_again_afterwards():
    import threading

    before = threading.active_count()
    with busy_cpu(2) as readers:
        assert readers == 2
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_facts_of_this_machine():
    facts = facts_of(CPU)
    assert facts.device_type == "cpu" and facts.cpus >= 1
    assert 0 < facts.free_bytes <= facts.memory_bytes
    assert facts.driver is None and facts.pcie_lanes is None


def test_the_generation_of_a_link_is_read_from_its_speed():
    assert generation_of("32.0 GT/s PCIe") == 5
    assert generation_of("8.0 GT/s PCIe") == 3
    assert generation_of("Unknown") is generation_of(None) is generation_of("") is None


def test_versions_outside_what_is_asked_for_are_named():
    assert unsupported({"torch": "2.11.0+cu130", "transformers": "5.24.0"}) == ()
    (found,) = unsupported({"torch": "1.13", "transformers": "5.24.0"})
    assert found.startswith("torch 1.13 (") and "2.11" in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_everything_is_measured_on_a_gpu():
    profile = probes.examine(torch.device("cuda", 0), quick=True)
    assert profile.failures == {}
    assert set(profile.measurements) > EXPECTED
    for one in profile.measurements.values():
        assert one.spread.least > 0
    assert profile.rate(LINK) > profile.rate(LINK_PAGEABLE)
