"""How much a probe does: sizes and repeats, by the device and by what memory there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from residency.runtime.free_memory import free_host_bytes

GIB, MIB = 1 << 30, 1 << 20
HOST_SHARE = 8  # of free memory a probe takes at most one part in so many


@dataclass(frozen=True)
class Effort:
    """repeats: timed, of each measurement. Bytes: of a bank in host memory, of a copy within the
    device's. side: of a square matrix product.
    """

    repeats: int
    bank_bytes: int
    device_bytes: int
    side: int

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> Effort:
        if device.type == "cuda":
            wanted = cls(3, GIB, GIB // 2, 4096) if quick else cls(5, 4 * GIB, GIB, 8192)
        else:
            wanted = cls(3, 64 * MIB, 64 * MIB, 512) if quick else cls(5, GIB, 256 * MIB, 2048)
        most = max(free_host_bytes() // HOST_SHARE, 16 * MIB)
        on_device = wanted.device_bytes if device.type == "cuda" else min(wanted.device_bytes, most)
        return cls(wanted.repeats, min(wanted.bank_bytes, most), on_device, wanted.side)
