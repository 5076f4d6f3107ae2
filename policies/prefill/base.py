"""The prefill mode interface: a mode answers with a plan, one executor runs every plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from residency.policies.base import Conflict, Part

MOST = 1 << 20  # of tokens in a chunk, of groups and of buffers


@dataclass(frozen=True)
class LayerView:
    """What a mode knows of one MoE layer and one chunk. All masks are bool [E] on the CPU.

    resident: experts of this layer that lie in slots now.
    routed: experts the chunk was routed to, or None while the router has not spoken.
    decodes_from_slots: whether decode reads this layer's experts from slots. Where it does not,
        the host computes them, and an expert that is admitted would lie in its slot for nothing.
    """

    layer: int
    num_tokens: int
    resident: torch.Tensor
    routed: torch.Tensor | None
    decodes_from_slots: bool = True


@dataclass(frozen=True)
class Plan:
    """Where each expert of a layer is read from. Disjoint bool [E] masks on the CPU.

    in_place: read from its slot, no copy.
    copy: slot to staging, device to device.
    stream: host bank to staging; the slots stay as they are.
    admit: host bank into a slot, evicting by the cache policy's rank.
    """

    in_place: torch.Tensor
    copy: torch.Tensor
    stream: torch.Tensor
    admit: torch.Tensor

    @classmethod
    def of(cls, num_experts: int, **masks: torch.Tensor) -> Plan:
        """A plan from the masks that are not empty."""
        nothing = torch.zeros(num_experts, dtype=torch.bool)
        return cls(**{field.name: masks.get(field.name, nothing) for field in fields(cls)})

    def streaming(self, declined: torch.Tensor) -> Plan:
        """The plan with what may not be admitted passing through staging instead: bool [E]."""
        stream = self.stream | (self.admit & declined)
        return replace(self, admit=self.admit & ~declined, stream=stream)

    def times_named(self) -> torch.Tensor:
        """How often each expert is named: int64 [E], 0 or 1 in a valid plan."""
        return torch.stack([self.in_place, self.copy, self.stream, self.admit]).sum(dim=0)


class PrefillMode(Part, ABC):
    """Plans the experts of one layer for one chunk of a prompt."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """chunk_tokens: tokens the model takes at a time during prefill.
        groups: parts a layer's experts are cut into; the copy of one overlaps the compute of
            another.
        ring: staging buffers, each of one group; 2 is enough to overlap.
        """

        chunk_tokens: int = 8192
        groups: int = 8
        ring: int = 3

    group: ClassVar[str] = "prefill"
    config: Config

    def faults(self) -> Iterator[Conflict]:
        for key, usual in (("chunk_tokens", 2048), ("groups", 8), ("ring", 3)):
            value = getattr(self.config, key)
            if not 1 <= value <= MOST:
                reason, mend = f"it must be from 1 to {MOST}", f"prefill.{key}={usual}"
                yield Conflict((f"prefill.{key}={value}",), reason, mend)

    @abstractmethod
    def waits_for_router(self, num_tokens: int) -> bool:
        """Whether a chunk of `num_tokens` is planned only after each layer's router has spoken.

        If not, `plan` is called with routed=None and copies run behind the previous layer.
        """

    def reads_in_place(self, num_tokens: int) -> bool:
        """Whether plans that wait for the router read every routed resident in place.

        Then residents may be computed before the host knows the routes.
        """
        return False

    @abstractmethod
    def plan(self, view: LayerView) -> Plan:
        """The plan for one layer. Mutates nothing.

        Names every expert of view.routed (every expert of the layer when routed is None) exactly
        once and puts only residents in `in_place` and `copy`; the runtime refuses other plans.
        """
