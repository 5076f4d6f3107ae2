"""The decode target interface: how many of a step's missing experts cross the link.

A decode step of one layer finds some of its experts in slots. Of the m that are missing, the
target's *quota* says how many are fetched into slots; the host computes the others where they lie,
at the same time. Which ones are fetched is not the target's choice: those of the highest rank under
the cache policy, by their (key, id) before this step's touch, highest first, for they are the ones
most worth a slot. (A policy keeps the keys of experts that are not resident.)
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch

from residency.policies.base import Conflict, Part


class Way(IntEnum):
    """Where a step of one layer got its missing experts from."""

    FETCHED = 0
    COMPUTED = 1
    BOTH = 2


@dataclass(frozen=True)
class Line:
    """Seconds for n experts of a layer: fixed_s + n * each_s. float64 [L], NaN where unknown."""

    fixed_s: torch.Tensor
    each_s: torch.Tensor

    def seconds(self, num: torch.Tensor) -> torch.Tensor:
        """num: [L, ...] or broadcastable to it."""
        shape = (-1, *[1] * (num.ndim - 1))
        return self.fixed_s.reshape(shape) + self.each_s.reshape(shape) * num


@dataclass(frozen=True)
class Measured:
    """What recent decode steps took, layer by layer: the sides alone, and side by side.

    fetched, computed: in steps in which the other side was idle.
    fetched_beside, computed_beside: in steps in which both ran, and slowed each other down.
    misses: float64 [L], missing experts per step, lately.
    steps: int64 [L, 3], steps that went each `Way`.
    idle_s: float64 [L, 3], seconds that the layer has spent since a step last went that way.
    """

    fetched: Line
    computed: Line
    fetched_beside: Line
    computed_beside: Line
    misses: torch.Tensor
    steps: torch.Tensor
    idle_s: torch.Tensor


class Quotas(NamedTuple):
    """table_LM: of m missing experts of a layer, column m says how many are fetched, from 0 to m.
    int [L, most + 1]. steps: after how many steps the target wants to be asked again.
    """

    table_LM: torch.Tensor
    steps: int


class DecodeTarget(Part, ABC):
    """Splits the missing experts of a decode step between the link and the host."""

    group: ClassVar[str] = "decode"
    splits: ClassVar[bool] = False  # whether `quotas` may leave experts to the host

    def host_layers(self, num_layers: int) -> frozenset[int]:
        """MoE layers of which decode fetches nothing, ever: their experts enter no slot.

        Raises ValueError for layers that the model does not have.
        """
        return frozenset()

    def layer_faults(self, num_layers: int) -> Iterator[Conflict]:
        """What in the config cannot work with a model of so many MoE layers."""
        return iter(())

    def quotas(self, measured: Measured, most: int) -> Quotas:
        """The quotas for up to `most` missing experts, from what was measured so far.

        Called between steps, on the host, where `splits`. Mutates nothing.
        """
        everything = torch.arange(most + 1).expand(len(measured.misses), most + 1)
        return Quotas(everything, steps=1)

    def computes_on_host(self, num_layers: int) -> bool:
        """Whether the host may have to compute an expert."""
        return self.splits or bool(self.host_layers(num_layers))


class SlotTarget(DecodeTarget):
    """A target that decodes from slots, apart from layers that the user places on the host."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """cpu_layers: MoE layers whose experts the host computes in decode and which take no
        slots: a list like [0,1,5], a count of the first ones, or a fraction like 0.25.
        """

        cpu_layers: Any = 0

    config: Config

    def faults(self) -> Iterator[Conflict]:
        asked = self.config.cpu_layers
        if not (_is_share(asked) or _is_count(asked) or _is_list(asked)):
            reason = "it must be a list of layers, a count of the first ones, or a fraction below 1"
            yield self._refused(reason)

    def layer_faults(self, num_layers: int) -> Iterator[Conflict]:
        try:
            layers = self.host_layers(num_layers)
        except ValueError as error:
            yield self._refused(str(error))
            return
        if len(layers) == num_layers:
            reason = (
                f"those are all {num_layers} MoE layers, which leaves no slots: that is decode=cpu"
            )
            yield self._refused(reason)

    def host_layers(self, num_layers: int) -> frozenset[int]:
        asked = self.config.cpu_layers
        if _is_share(asked):
            return frozenset(range(round(asked * num_layers)))
        layers = range(asked) if _is_count(asked) else asked
        if any(layer >= num_layers for layer in layers):
            last = f"the model has {num_layers} MoE layers, 0 to {num_layers - 1}"
            raise ValueError(f"{last}, and this asks for layer {max(layers)}")
        return frozenset(layers)

    def _refused(self, reason: str) -> Conflict:
        asked = str(self.config.cpu_layers).replace(" ", "")
        return Conflict((f"decode.cpu_layers={asked}",), reason, "decode.cpu_layers=0")


def _is_count(asked: object) -> bool:
    return isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0


def _is_share(asked: object) -> bool:
    return isinstance(asked, float) and 0 <= asked < 1


def _is_list(asked: object) -> bool:
    if not isinstance(asked, list):
        return False
    return all(map(_is_count, asked)) and len(set(asked)) == len(asked)
