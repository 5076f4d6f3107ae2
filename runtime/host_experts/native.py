"""The native library's interface, as ctypes sees it; experts.cpp says what the fields mean."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import torch

from residency.runtime.host_experts.build import load

FORMATS = ("fp32", "bf16", "fp16", "fp8_block", "nvfp4", "mxfp4")  # in the library's numbers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SILU, CLAMPED_SWIGLU = range(2)
ABSENT = -1  # the offset of a part that a row does not have


class Offsets(ctypes.Structure):
    """Where a matrix's parts lie in a row, in bytes."""

    _fields_ = [(name, c_int64) for name in ("elements", "scale", "outer", "bias")]


class Job(ctypes.Structure):
    """One layer's experts over a fixed number of tokens; the pointers are to host memory."""

    _fields_ = [
        ("bank", c_void_p),
        ("row_bytes", c_int64),
        *((name, c_void_p) for name in ("x", "ids", "weights", "chosen", "y", "stats", "pool")),
        ("gate_up", Offsets),
        ("down", Offsets),
        *((name, c_int32) for name in ("T", "K", "E", "H", "I")),
        *((name, c_int32) for name in ("format", "x_dtype", "bias_dtype")),
        *((name, c_int32) for name in ("activation", "transposed", "interleaved")),
        *((name, c_float) for name in ("alpha", "limit")),
    ]


class Library:
    """The loaded library, its functions typed. Raises BuildError where there is none.

    flags: more flags for the compiler, for tests.
    """

    def __init__(self, *flags: str) -> None:
        library = load(*flags)
        self.run = library.residency_run
        self.run.argtypes, self.run.restype = [c_void_p], None
        self.pool = library.residency_pool
        self.pool.argtypes, self.pool.restype = [c_int32], c_void_p
        self.pool_free = library.residency_pool_free
        self.pool_free.argtypes, self.pool_free.restype = [c_void_p], None
        self.read_rate = library.residency_read_rate
        self.read_rate.argtypes = [c_void_p, c_void_p, c_int64]
        self.read_rate.restype = c_double

    @property
    def run_address(self) -> int:
        """Of residency_run, a cudaHostFn_t: takes the address of a Job, calls nothing of CUDA."""
        return ctypes.cast(self.run, c_void_p).value or 0
