"""Pinning: bank memory that was touched already is registered with CUDA, in parallel.

Registering touched pages is many times faster than a fresh pinned allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from residency.policies.errors import CapacityError

NUM_THREADS = 8
SUCCESS = 0


class Pinned:
    """Holds host tensors registered until `release`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], progress: Callable[[str, int, int], None] | None
    ) -> None:
        """Raises CapacityError when CUDA refuses; nothing stays registered then."""
        self._pieces: list[int] = []
        total = sum(tensor.nbytes for tensor in tensors)
        done = 0
        try:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                for tensor in pool.map(self._register, tensors):
                    done += tensor.nbytes
                    if progress is not None:
                        progress("pinned", done, total)
        except BaseException:
            self.release()
            raise

    def _register(self, tensor: torch.Tensor) -> torch.Tensor:
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if code != SUCCESS:
            raise CapacityError(
                f"host memory cannot be pinned (CUDA error {code} for {tensor.nbytes / 2**30:.1f} "
                "GiB): raise the locked-memory limit (ulimit -l), or set "
                "device.allow_pageable=true to run slower without"
            )
        self._pieces.append(tensor.data_ptr())
        return tensor

    def release(self) -> None:
        while self._pieces:
            torch.cuda.cudart().cudaHostUnregister(self._pieces.pop())
