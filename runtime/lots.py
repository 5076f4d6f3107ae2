"""Lots: experts of a layer that prefill copies and computes together."""

from __future__ import annotations

from dataclasses import dataclass

from residency.runtime.lanes import Mark
from residency.runtime.staging import Buffer


@dataclass(frozen=True)
class Lot:
    """Experts (ids within the layer) that are computed together once `ready` has passed."""

    layer: int
    experts: list[int]
    rows: list[int]
    ready: Mark
    buffer: Buffer | None = None


@dataclass(frozen=True)
class Pending:
    """A lot whose staging copy is planned but not issued."""

    layer: int
    experts: list[int]
    slots: list[int] | None  # copied from these slots, or from the bank when None
