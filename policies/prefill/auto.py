"""auto: no threshold. Measured costs say what is worth fetching before the router speaks.

Of a layer's missing experts, in the order of the chance that the chunk is routed to them, the first
n are streamed before, mostly while the link would be idle anyway; of the others those that it is
routed to are fetched when the router has spoken. A layer then takes

    max(idle, n * t) + t * sum of the chances of the others

where t is the time of one expert over the link; n is chosen for the least. Without waiting for the
router a layer takes the time of all its missing experts, or of the compute behind which they are
copied. The lesser way is taken, layer by layer; residents are read in place in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from residency.policies.base import Need
from residency.policies.prefill.base import (
    Ahead,
    Choice,
    Costs,
    LayerView,
    Plan,
    PrefillMode,
    missing_plan,
)
from residency.policies.prefill.demand import Demand

LEAST_CHANCE = 0.05  # a guess that is hardly ever right only burns energy
LEAST_GAIN = 0.03  # below it, chances and costs are not known well enough to wait
USED_IDLE = 0.75  # of the idle time; what is copied beyond it delays what is needed
NOTHING_KNOWN = Costs(expert_s=1.0, idle_s=0.0)  # until costs are measured, bytes decide

STREAM, WAIT, AHEAD = "stream", "wait", "ahead"


class Auto(PrefillMode):
    """Chooses for each layer and chunk by expected time."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(PrefillMode.Config):
        """profile: file in which measured costs are kept from run to run; empty for the one of this
        device, format and expert shape in the user's cache folder.
        """

        profile: str = ""

    needs: ClassVar[tuple[Need, ...]] = Demand.needs
    config: Config
    learns = True
    asks_router = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.profile = config.profile

    def ahead(self, view: LayerView) -> Ahead:
        assert view.chances is not None, "auto is told the chances"
        missing = ~view.resident
        costs = view.costs or NOTHING_KNOWN
        num_missing = int(missing.sum())
        chances, order = torch.where(missing, view.chances, 0.0).sort(descending=True, stable=True)
        num_worth = int((chances >= LEAST_CHANCE).sum())
        ahead_s = costs.expert_s * torch.arange(num_worth + 1, dtype=torch.float64)
        later = chances.sum() - torch.cat([chances.new_zeros(1), chances[:num_worth].cumsum(0)])
        ways_s = ahead_s.clamp(min=USED_IDLE * costs.idle_s) + costs.expert_s * later
        num_ahead = int(ways_s.argmin())
        wait_s = max(costs.idle_s, float(ahead_s[num_ahead]))
        wait_s += costs.expert_s * float(later[num_ahead])
        stream_s = max(costs.idle_s, num_missing * costs.expert_s)
        expected_s = {} if view.costs is None else {STREAM: stream_s, WAIT: wait_s}
        num_experts = len(missing)
        if stream_s * (1 - LEAST_GAIN) <= wait_s:
            plan = Plan.of(num_experts, in_place=view.resident, stream=missing)
            return Ahead(plan, waits=False, choice=Choice(STREAM, expected_s))
        early = torch.zeros_like(missing)
        early[order[:num_ahead]] = True
        plan = Plan.of(num_experts, in_place=view.resident, stream=early)
        return Ahead(plan, True, Choice(AHEAD if num_ahead else WAIT, expected_s))

    def plan(self, view: LayerView) -> Plan:
        """A chunk that would go through all slots, and evict its own experts, fills empty ones at
        most: of each layer the likeliest experts, alike many.
        """
        if view.cycle > view.num_slots:
            view = replace(view, welcome=_likeliest(view))
        return missing_plan(view)


def _likeliest(view: LayerView) -> torch.Tensor:
    """Of the experts to be fetched that may enter slots, the layer's share of the empty slots."""
    assert view.chances is not None and view.routed is not None, "the router has spoken"
    wanted = view.routed & ~view.resident & view.welcome
    order = torch.where(wanted, view.chances, -1.0).argsort(descending=True, stable=True)
    share = view.num_empty // view.num_sharing
    chosen = torch.zeros_like(wanted)
    chosen[order[:share]] = True
    return wanted & chosen
