"""Lots: experts of a layer that prefill copies and computes together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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

    def only(self, chosen: torch.Tensor) -> Lot:
        """Without the experts that are not chosen, bool [E]."""
        used = [i for i, expert in enumerate(self.experts) if chosen[expert]]
        experts, rows = ([of[i] for i in used] for of in (self.experts, self.rows))
        return replace(self, experts=experts, rows=rows)


@dataclass(frozen=True)
class Pending:
    """A lot whose staging copy is planned but not issued. waited: for the layer's router."""

    layer: int
    experts: list[int]
    slots: list[int] | None  # copied from these slots, or from the bank when None
    waited: bool


def rows_of(lots: Iterable[Lot]) -> dict[int, int]:
    """The rows of all their experts."""
    pairs = [zip(lot.experts, lot.rows, strict=True) for lot in lots]
    return dict(itertools.chain.from_iterable(pairs))


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
