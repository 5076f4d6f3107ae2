"""The prefill mode interface: a mode answers with plans, one executor runs every plan.

A layer of a chunk is planned twice at most. `ahead` says what is done before the layer's router has
spoken, behind the layers before; if that does not cover the layer, `plan` says where the other
routed experts come from once the router has spoken.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from residency.policies.base import Conflict, Part
from residency.policies.errors import PolicyError

MOST = 1 << 20  # of tokens in a chunk, of groups and of buffers


@dataclass(frozen=True)
class Costs:
    """What copies take on this machine, measured while it ran. Seconds.

    expert_s: one expert over the link, as contended.
    idle_s: in a layer of a chunk of this length, how long the link would have nothing to copy from
        the layer's last copy to the first one that waits for the next layer's router.
    host_s: in such a layer, what the host takes from that first copy until all of the layer is
        issued; copies that take no longer hold nobody up.
    """

    expert_s: float
    idle_s: float
    host_s: float = 0.0


@dataclass(frozen=True)
class LayerView:
    """What a mode knows of one MoE layer and one chunk. All masks are bool [E] on the CPU.

    resident: experts of this layer that lie in slots now.
    welcome: experts that may enter slots: the cache admits them, and decode reads this layer's
        slots.
    routed: experts the chunk was routed to, or None while the router has not spoken.
    landed: experts on their way to staging, or there, because `ahead` asked for them.
    guessed: int64 [E], for how many of the chunk's tokens the layer's router named each expert when
        it was asked early, with the state of the layer before; None where it was not asked.
    chances: float64 [E], for each expert the chance that the chunk is routed to it, by earlier
        chunks; None unless the mode `learns` and `wants_chances`.
    lacked: how many experts a layer was routed to that were not resident, in recent chunks of about
        this length; infinite where none are known.
    cycle: experts that the chunk is expected to be routed to in all layers that share this one's
        slots; 0 unless the mode `learns`.
    num_sharing: those of these layers that are still to come, this one included.
    num_slots: that the layer's experts may take.
    num_empty: of them; 0 unless the mode `learns`.
    costs: None until they have been measured, or unless the mode `learns`.
    """

    layer: int
    num_tokens: int
    resident: torch.Tensor
    welcome: torch.Tensor
    routed: torch.Tensor | None = None
    landed: torch.Tensor | None = None
    guessed: torch.Tensor | None = None
    chances: torch.Tensor | None = None
    lacked: float = math.inf
    cycle: float = 0.0
    num_sharing: int = 1
    num_slots: int = 0
    num_empty: int = 0
    costs: Costs | None = None


@dataclass(frozen=True)
class Plan:
    """Where each expert of a layer is read from. Disjoint bool [E] masks on the CPU.

    in_place: read from its slot, no copy.
    copy: slot to staging, device to device.
    stream: host bank to staging; the slots stay as they are.
    admit: into a slot, from the host bank or from staging where it landed ahead, evicting by the
        cache policy's rank.
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

    def times_named(self) -> torch.Tensor:
        """How often each expert is named: int64 [E], 0 or 1 in a valid plan."""
        return torch.stack([self.in_place, self.copy, self.stream, self.admit]).sum(dim=0)


@dataclass(frozen=True)
class Choice:
    """What a mode chose for a layer among several ways, for the report.

    expected_s: by way, the seconds that the layer was expected to take; empty if nothing is known.
    """

    name: str
    expected_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ahead:
    """What is done for a layer before its router has spoken.

    plan: admits nothing. Residents read in place are computed before the host knows the routes.
    waits: `PrefillMode.plan` is asked for the rest once the router has spoken. Otherwise the plan
        names every expert of the layer, and the host does not wait.
    """

    plan: Plan
    waits: bool
    choice: Choice | None = None


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
    learns: bool = False  # its plans follow from chances and costs
    asks_router: bool = False  # its plans follow from guesses
    profile: str | None = None  # file that costs are kept in; "" for the device's own

    def faults(self) -> Iterator[Conflict]:
        for key, usual in (("chunk_tokens", 2048), ("groups", 8), ("ring", 3)):
            value = getattr(self.config, key)
            if not 1 <= value <= MOST:
                reason, mend = f"it must be from 1 to {MOST}", f"prefill.{key}={usual}"
                yield Conflict((f"prefill.{key}={value}",), reason, mend)

    def wants_chances(self, view: LayerView) -> bool:
        """Whether `ahead` or `plan` will look at the chances of a mode that `learns`. Told
        everything but those: to work them out takes longer than many a plan.
        """
        return True

    @abstractmethod
    def ahead(self, view: LayerView) -> Ahead:
        """What is done for a layer before its router has spoken. Mutates nothing."""

    def plan(self, view: LayerView) -> Plan:
        """The rest of a layer whose `ahead` waits, when the router has spoken. Mutates nothing.

        Names each routed expert once that is neither read nor landed by `ahead`; of those that
        landed it may admit some. Both plans put only residents in `in_place` and `copy`, and admit
        only who is welcome; the runtime refuses other plans.
        """
        raise PolicyError(f"prefill={self.name}: waits for routers and has no plan for then")


def missing_plan(view: LayerView) -> Plan:
    """Routed experts that are not resident: into slots where they are welcome, else streamed."""
    assert view.routed is not None and view.landed is not None, "the router has spoken"
    missing = view.routed & ~view.resident
    streamed = missing & ~view.welcome & ~view.landed
    return Plan.of(len(missing), admit=missing & view.welcome, stream=streamed)
