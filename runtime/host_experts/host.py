"""Experts computed on the host from the rows of the banks: by the native library, or by torch.

Both forms run the same jobs. Only the native form can be captured in a CUDA graph, as a host node:
`function_address` with a job's `address`.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any, Protocol

import torch

from residency.runtime.banks import Banks
from residency.runtime.experts import Call, ExpertMath
from residency.runtime.host_experts import native
from residency.runtime.host_experts.build import BuildError
from residency.runtime.host_experts.gates import Gate, gate_of
from residency.runtime.host_experts.jobs import HostJob, Sizes, offsets

READ_RATE_BYTES = 4 << 30  # of a layer's bank, at most: no cache holds as much


class HostExperts(Protocol):
    """The experts of all layers, computed where they lie.

    name: for reports. reason: why it is not the native form, else None.
    """

    name: str
    reason: str | None

    def job(self, layer: int, num_tokens: int, *, pin: bool = False) -> HostJob: ...

    def run(self, job: HostJob) -> None:
        """Compute; returns when the job's y_TH is written. Jobs of one object run one by one."""


def open_host_experts(
    banks: Banks, module: Any, dtype: torch.dtype, threads: int | None = None
) -> HostExperts:
    """The native form where it can be had, else torch's, which says why.

    module: an experts module of transformers, with or without its parameters. dtype: the model's,
    of activations and biases. threads: the caller's included; None: one for each CPU given to this
    process but one, which is Python's.
    """
    gate = gate_of(module)
    if banks.layout.format.name not in native.FORMATS:
        reason = f"no native form for experts in {banks.layout.format.name}"
    elif dtype not in native.DTYPES:
        reason = f"no native form for activations in {dtype}"
    elif gate is None:
        reason = f"no native form for the gate of {type(module).__name__}"
    else:
        try:
            return NativeHostExperts(native.Library(), banks, gate, dtype, threads)
        except BuildError as error:
            reason = str(error)
    return TorchHostExperts(banks, module, dtype, reason)


class NativeHostExperts:
    """By the native library, on a pool of threads of its own."""

    name = "native"
    reason: str | None = None

    def __init__(
        self,
        library: native.Library,
        banks: Banks,
        gate: Gate,
        dtype: torch.dtype,
        threads: int | None = None,
    ) -> None:
        self.banks = banks
        self.dtype = dtype
        self.threads = threads or max(1, len(os.sched_getaffinity(0)) - 1)
        self._gate = gate
        self._sizes = Sizes.of(banks.layout)
        self._library = library
        self._pool = library.pool(self.threads)
        self._end = weakref.finalize(self, library.pool_free, self._pool)

    def job(self, layer: int, num_tokens: int, *, pin: bool = False) -> HostJob:
        """A job without any expert chosen. pin: its tensors are shared with a CUDA device."""
        layout, space = self.banks.layout, self.banks.space
        job = HostJob.empty(layer, num_tokens, space, self._sizes.hidden, self.dtype, pin)
        at = job.native
        at.pool = self._pool
        at.bank, at.row_bytes = self.banks.layers[layer].data_ptr(), layout.row_bytes
        at.gate_up, at.down = offsets(layout, "gate_up_proj"), offsets(layout, "down_proj")
        at.I, at.transposed = self._sizes.width, self._sizes.transposed
        at.format = native.FORMATS.index(layout.format.name)
        at.x_dtype = at.bias_dtype = native.DTYPES.index(self.dtype)
        at.activation, at.interleaved, at.alpha, at.limit = self._gate
        return job

    def run(self, job: HostJob) -> None:
        self._library.run(job.address)

    @property
    def function_address(self) -> int:
        """Of a cudaHostFn_t that runs the job whose address it is given."""
        return self._library.run_address

    def read_rate(self, layer: int = 0) -> float:
        """Bytes a second at which the threads together read a layer's bank and do nothing else."""
        rows = self.banks.layers[layer]
        num_bytes = min(rows.nbytes, READ_RATE_BYTES)
        return float(self._library.read_rate(self._pool, rows.data_ptr(), num_bytes))


class TorchHostExperts:
    """By torch: each expert is dequantised, then applied. Not for capture."""

    name = "torch"

    def __init__(
        self, banks: Banks, module: Any, dtype: torch.dtype, reason: str | None = None
    ) -> None:
        self.banks = banks
        self.dtype = dtype
        self.reason = reason
        self._module = module
        self._hidden = Sizes.of(banks.layout).hidden
        self._maths = [ExpertMath(banks.layout, rows) for rows in banks.layers]

    def job(self, layer: int, num_tokens: int, *, pin: bool = False) -> HostJob:
        return HostJob.empty(layer, num_tokens, self.banks.space, self._hidden, self.dtype, pin)

    def run(self, job: HostJob) -> None:
        begin = time.perf_counter_ns()
        maths = self._maths[job.layer]
        work = maths.begin(Call(self._module, job.x_TH, job.ids_TK, job.weights_TK))
        experts = [e for e in job.ids_TK.unique().tolist() if e >= 0 and job.chosen_E[e]]
        maths.run(work, experts, experts)
        job.y_TH.copy_(work.combined())
        job.stats.add_(torch.tensor([time.perf_counter_ns() - begin, len(experts), 1]))
