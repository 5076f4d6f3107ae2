"""Host nodes: functions of the host on a stream of their own, which a CUDA graph may capture.

`cudaLaunchHostFunc` is called by its C interface, so that no Python runs when a graph is replayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from residency.runtime.host_experts import HostExperts, HostJob
from residency.runtime.lanes import Mark

SUCCESS = 0


class HostNodes:
    """Runs jobs beside the compute lane."""

    def __init__(self, experts: HostExperts, device: torch.device) -> None:
        self.experts = experts
        self._device = device
        self._jobs: dict[tuple[int, int], HostJob] = {}
        self._stream: torch.cuda.Stream | None = None
        self._tail = Mark()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._launch = _launch_host_function()

    @classmethod
    def of(cls, experts: HostExperts | None, device: torch.device) -> HostNodes | None:
        """None for experts that no host node can compute: there is no function to give to CUDA."""
        if experts is None or not hasattr(experts, "function_address"):
            return None
        return cls(experts, device)

    @property
    def is_timed(self) -> bool:
        """Whether the device has a clock that kernels can read."""
        return self._stream is not None

    def streams(self) -> dict[str, torch.cuda.Stream]:
        """None on the CPU."""
        return {} if self._stream is None else {"host experts": self._stream}

    def job(self, layer: int, num_tokens: int) -> HostJob:
        """The layer's job for so many tokens; the same one each time."""
        key = (layer, num_tokens)
        if key not in self._jobs:
            self._jobs[key] = self.experts.job(layer, num_tokens, pin=self._stream is not None)
        return self._jobs[key]

    def run(self, job: HostJob, end: torch.Tensor) -> Mark:
        """Run the job behind the compute lane's work so far; the mark lies behind it.

        end: int64 [1] on the device, becomes the time at which it was done.
        """
        if self._stream is None:
            self.experts.run(job)
            return Mark()
        from residency.runtime.kernels.publish import launch_stamp

        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        function: int = getattr(self.experts, "function_address")  # noqa: B009
        code = self._launch(self._stream.cuda_stream, function, job.address)
        assert code == SUCCESS, f"cudaLaunchHostFunc failed with CUDA error {code}"
        done = Mark(self._stream.record_event())
        with torch.cuda.stream(self._stream):
            launch_stamp(end)
        self._tail = Mark(self._stream.record_event())
        return done

    def join(self) -> None:
        """The compute lane goes on behind everything that was run."""
        if self._tail.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._tail.event)
            self._tail = Mark()


def _launch_host_function() -> Any:
    """cudaLaunchHostFunc(stream, function, argument) of the CUDA runtime that torch has loaded."""
    for library in _runtimes():
        launch = getattr(library, "cudaLaunchHostFunc", None)
        if launch is not None:
            launch.argtypes = [ctypes.c_void_p] * 3
            launch.restype = ctypes.c_int
            return launch
    raise AssertionError("torch runs on CUDA, and no CUDA runtime is loaded")


def _runtimes() -> Iterator[ctypes.CDLL]:
    yield ctypes.CDLL(None)
    with open("/proc/self/maps") as lines:
        paths = {line.split(None, 5)[-1].strip() for line in lines if "libcudart" in line}
    yield from (ctypes.CDLL(path) for path in sorted(paths))
