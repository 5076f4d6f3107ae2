"""auto: no threshold. Measured costs say what is worth fetching before the router speaks.

Of a layer's missing experts, in the order of the chance that the chunk is routed to them, the first
n are streamed before, mostly while the link would be idle anyway; of the others those that it is
routed to are fetched when the router has spoken. A layer then takes

    max(idle, n * t) + max(host, t * sum of the chances of the others)

where t is the time of one expert over the link, and host what the host takes to plan and issue the
layer meanwhile, a quarter more if anything is fetched ahead; n is chosen for the least. Without
waiting for the router a layer takes the time of all its missing experts, or of the compute behind
which they are copied. The lesser way is taken, layer by layer; residents are read in place in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
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
LEAST_GAIN = 0.03  # below it, chances and costs are not known well enough
AHEAD_WORK = 1.25  # of the host's time: what is fetched ahead is a lot more, and chances to weigh
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

    def wants_chances(self, view: LayerView) -> bool:
        """Not where the host will be the last to be done with a layer, whatever is fetched ahead
        of its router, and no more experts are wanted than there are slots.
        """
        costs = view.costs
        if costs is None or view.cycle > view.num_slots or math.isinf(view.lacked):
            return True
        copied_s = view.lacked * costs.expert_s
        spared_s = copied_s - AHEAD_WORK * costs.host_s
        return spared_s > LEAST_GAIN * copied_s

    def ahead(self, view: LayerView) -> Ahead:
        # A chunk waits for this: numpy's calls are shorter than torch's.
        missing_E, costs = ~view.resident.numpy(), view.costs or NOTHING_KNOWN
        early_E, wait_s = _early(view, missing_E, costs)
        stream_s = max(costs.idle_s, int(np.count_nonzero(missing_E)) * costs.expert_s)
        expected_s = {} if view.costs is None else {STREAM: stream_s, WAIT: wait_s}
        waits = stream_s * (1 - LEAST_GAIN) > wait_s
        streamed = torch.from_numpy(early_E if waits else missing_E)
        plan = Plan.of(len(missing_E), in_place=view.resident, stream=streamed)
        name = STREAM if not waits else AHEAD if early_E.any() else WAIT
        return Ahead(plan, waits, Choice(name, expected_s))

    def plan(self, view: LayerView) -> Plan:
        """A chunk that would go through all slots, and evict its own experts, fills empty ones at
        most: of each layer the likeliest experts, alike many.
        """
        if view.cycle > view.num_slots:
            view = replace(view, welcome=_likeliest(view))
        return missing_plan(view)


def _early(view: LayerView, missing_E: np.ndarray, costs: Costs) -> tuple[np.ndarray, float]:
    """Whom to fetch before the router speaks, bool [E], and what the layer then takes."""
    early_E = np.zeros_like(missing_E)
    if view.chances is None:
        return early_E, costs.idle_s + max(costs.host_s, costs.expert_s * view.lacked)
    chance_E = np.where(missing_E, view.chances.numpy(), 0.0)
    order = np.argsort(-chance_E, kind="stable")
    chances = chance_E[order]
    num_worth = np.count_nonzero(chances >= LEAST_CHANCE)
    ahead_s = costs.expert_s * np.arange(num_worth + 1)
    later = chances.sum() - np.concatenate([[0.0], chances[:num_worth].cumsum()])
    later_s = np.maximum(costs.host_s * AHEAD_WORK, costs.expert_s * later)
    later_s[0] = max(costs.host_s, costs.expert_s * later[0])
    ways_s = np.maximum(ahead_s, USED_IDLE * costs.idle_s) + later_s
    number = int(ways_s.argmin())
    if ways_s[0] - ways_s[number] <= LEAST_GAIN * later_s[0]:
        number = 0
    early_E[order[:number]] = True
    return early_E, max(costs.idle_s, float(ahead_s[number])) + float(later_s[number])


def _likeliest(view: LayerView) -> torch.Tensor:
    """Of the experts to be fetched that may enter slots, the layer's share of the empty slots."""
    assert view.chances is not None and view.routed is not None, "the router has spoken"
    wanted_E = (view.routed & ~view.resident & view.welcome).numpy()
    order = np.argsort(-np.where(wanted_E, view.chances.numpy(), -1.0), kind="stable")
    share = view.num_empty // view.num_sharing
    chosen_E = np.zeros_like(wanted_E)
    chosen_E[order[:share]] = True
    return torch.from_numpy(wanted_E & chosen_E)
