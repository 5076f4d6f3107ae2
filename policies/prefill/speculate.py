"""speculate: demand, with experts fetched ahead that the next layer's router is likely to name.

While a layer computes, the next layer's router is asked early, with the state at hand (A. Eliseev
and D. Mazur, "Fast inference of mixture-of-experts language models with offloading", 2023). What
it names and no slot holds crosses the link behind the layer's own copies, into staging, so that a
wrong guess evicts nothing. The router's real answer then fetches the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from residency.policies.base import Conflict, Need
from residency.policies.prefill.base import Ahead, LayerView, Plan, PrefillMode, missing_plan
from residency.policies.prefill.demand import Demand


class Speculate(PrefillMode):
    """Fetches ahead, of the missing experts, those that most tokens name."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(PrefillMode.Config):
        """most_ahead: the most experts that are fetched ahead in a layer."""

        most_ahead: int = 16

    needs: ClassVar[tuple[Need, ...]] = Demand.needs
    config: Config
    asks_router = True

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        if self.config.most_ahead < 1:
            key = (f"prefill.most_ahead={self.config.most_ahead}",)
            yield Conflict(key, "nothing would ever be fetched ahead", "prefill=demand")

    def ahead(self, view: LayerView) -> Ahead:
        stream = torch.zeros_like(view.resident)
        if view.guessed is not None:
            named = view.guessed * ~view.resident
            best = named.argsort(descending=True, stable=True)[: self.config.most_ahead]
            stream[best[named[best] > 0]] = True
        plan = Plan.of(len(stream), in_place=view.resident, stream=stream)
        return Ahead(plan, waits=True)

    def plan(self, view: LayerView) -> Plan:
        return missing_plan(view)
