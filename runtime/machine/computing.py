"""Computing: matrix products of the device, experts on the host, the rate of reading its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch

from residency.policies.step import IdSpace
from residency.runtime.banks import Banks
from residency.runtime.formats import FORMATS
from residency.runtime.host_experts import HostJob, NativeHostExperts
from residency.runtime.host_experts.gates import Gate
from residency.runtime.host_experts.native import SILU, Library
from residency.runtime.layout import RowLayout, part_name
from residency.runtime.machine.copies import link_under_load
from residency.runtime.machine.measurement import (
    BYTES_S,
    GEMM_BF16,
    GEMM_FP32,
    HOST_READ,
    HOST_TURN,
    OPERATIONS_S,
    SECONDS,
    Measurement,
    host_experts,
    rates,
)
from residency.runtime.machine.sizes import Effort

HIDDEN, WIDTH, TOP_K = 2048, 768, 8  # of an expert of Qwen3-30B-A3B
FORMATS_MEASURED = ("bf16", "fp8_block", "nvfp4", "mxfp4")
CALLS = 8  # of each repeat
FEW = 4  # different experts that a bank is filled with


def products(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """Square products; multiplications and additions count as two operations."""
    for name, dtype in ((GEMM_BF16, torch.bfloat16), (GEMM_FP32, torch.float32)):
        a, b = torch.randn(2, effort.side, effort.side, device=device).to(dtype)
        operations = 2 * effort.side**3
        found = rates(partial(torch.matmul, a, b), operations, device, effort.repeats)
        what = f"{effort.side} x {effort.side} times the same"
        yield Measurement.of(name, what, OPERATIONS_S, found)


def experts_on_the_host(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """Bytes of weights a second at one token, alone and while the link copies.

    Raises BuildError where the native library cannot be had.
    """
    library = Library()
    for form in FORMATS_MEASURED:
        host = _host(library, form, effort)
        threads = host.threads
        if form == FORMATS_MEASURED[0]:
            read = [host.read_rate() for _ in range(effort.repeats)]
            what = f"reading memory and doing nothing else (threads: {threads})"
            yield Measurement.of(HOST_READ, what, BYTES_S, read)
        for beside in (False, True):
            load = link_under_load(device) if beside else nullcontext()
            with load:
                found = _expert_rates(host, effort)
            what = (
                f"{TOP_K} of {host.banks.space.num_experts} experts, one token (threads: {threads})"
            )
            name = host_experts(form, beside=beside)
            yield Measurement.of(name, what + (", link busy" if beside else ""), BYTES_S, found)


def host_turns(device: torch.device, effort: Effort) -> Iterator[Measurement]:
    """What a layer takes for the host to be asked and to answer, without an expert to compute.

    On a GPU as nodes of a graph, as a decode step asks; on the CPU as a call.
    """
    host = _host(Library(), FORMATS_MEASURED[0], effort)
    turn = _captured_turns if device.type == "cuda" else _called_turns
    what = "a layer's question to the host and its answer, no expert computed"
    yield Measurement.of(HOST_TURN, what, SECONDS, turn(host, device, effort))


def _host(library: Library, form: str, effort: Effort) -> NativeHostExperts:
    matrices = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    layout = RowLayout.of(matrices, FORMATS[form], torch.bfloat16)
    number = max(2 * TOP_K, min(512, effort.bank_bytes // layout.row_bytes))
    banks = Banks(IdSpace(1, number, TOP_K), layout)
    views = banks.weights(0)
    generator = torch.Generator().manual_seed(0)
    for matrix, extent in matrices.items():
        few = layout.format.quantise(torch.randn(FEW, *extent, generator=generator) * 0.02)
        for suffix, stored in few.items():
            part = views[part_name(matrix, suffix)]
            source = stored.reshape(FEW, *part.shape[1:])
            for begin in range(0, len(part), FEW):
                part[begin : begin + FEW].copy_(source[: len(part) - begin])
    return NativeHostExperts(library, banks, Gate(SILU), torch.bfloat16)


def _job(host: NativeHostExperts, *, chosen: bool, pin: bool = False) -> HostJob:
    job = host.job(0, 1, pin=pin)
    job.x_TH.normal_()
    job.weights_TK.fill_(1 / TOP_K)
    job.chosen_E.fill_(int(chosen))
    return job


def _expert_rates(host: NativeHostExperts, effort: Effort) -> list[float]:
    """By the library's own clock, over random routes."""
    job, row_bytes = _job(host, chosen=True), host.banks.layout.row_bytes
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(1 + effort.repeats):
        before = int(job.stats[0])
        for _ in range(CALLS):
            order = torch.randperm(host.banks.space.num_experts, generator=generator)
            job.ids_TK.copy_(order[None, :TOP_K])
            host.run(job)
        nanoseconds = max(int(job.stats[0]) - before, 1)
        found.append(CALLS * TOP_K * row_bytes / nanoseconds * 1e9)
    return found[1:]  # the first is a warm-up


def _called_turns(host: NativeHostExperts, device: torch.device, effort: Effort) -> list[float]:
    job = _job(host, chosen=False)

    def calls() -> None:
        for _ in range(CALLS):
            host.run(job)

    return [1 / rate for rate in rates(calls, CALLS, device, effort.repeats)]


def _captured_turns(host: NativeHostExperts, device: torch.device, effort: Effort) -> list[float]:
    from residency.runtime.graphs import Graphs
    from residency.runtime.host_nodes import HostNodes

    nodes, job = HostNodes(host, device), _job(host, chosen=False, pin=True)
    end = torch.zeros(1, dtype=torch.int64, device=device)

    def body() -> None:
        for _ in range(CALLS):
            done = nodes.run(job, end)
            assert done.event is not None, "a host node of a GPU ends in an event"
            torch.cuda.current_stream(device).wait_event(done.event)
        nodes.join()

    graphs = Graphs()
    for _ in range(2):  # run, then captured
        graphs.run("turns", body, on=device)
    replay = rates(lambda: graphs.run("turns", body, on=device), CALLS, device, effort.repeats)
    torch.cuda.synchronize(device)  # the job must outlive its nodes
    return [1 / rate for rate in replay]
