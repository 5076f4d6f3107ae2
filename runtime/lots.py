"""Lots: experts of a layer that prefill copies and computes together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from residency.policies.prefill import Plan
from residency.runtime.lanes import Mark
from residency.runtime.prefill_plans import ids_of
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
    """A lot whose staging copy is planned but not issued. waited: for the layer's router."""

    layer: int
    experts: list[int]
    slots: list[int] | None  # copied from these slots, or from the bank when None
    waited: bool


def staged(
    layer: int, plan: Plan, slots_E: torch.Tensor, group_size: int, *, waited: bool
) -> Iterator[Pending]:
    """Lots through staging, hits first, cut to the group size. slots_E: int32 [E]."""
    for group in _groups(plan.copy, group_size):
        yield Pending(layer, group, slots_E[group].tolist(), waited)
    for group in _groups(plan.stream, group_size):
        yield Pending(layer, group, None, waited)


def _groups(mask: torch.Tensor, size: int) -> Iterator[list[int]]:
    experts = ids_of(mask)
    for start in range(0, len(experts), size):
        yield experts[start : start + size]
