"""demand: a short chunk loads just the experts it routes to, and they stay in the slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from residency.policies.base import Capability, Conflict, Need
from residency.policies.prefill.base import Ahead, LayerView, Plan, PrefillMode, missing_plan


class Demand(PrefillMode):
    """A chunk of at most max_tokens admits its routed experts; longer ones go to `otherwise`.

    Experts that may not enter the slots pass through staging.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(PrefillMode.Config):
        """max_tokens: the longest chunk that is loaded by demand.
        otherwise: the prefill mode for longer chunks.
        """

        max_tokens: int = 256
        otherwise: str = field(default="always_stream", metadata={"option_of": "prefill"})

    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            Capability.DECODES_FROM_SLOTS,
            because="it admits the chunk's experts into the device's slots, which this target "
            "never reads: it computes on the host",
            mend="decode=gpu",
        ),
        Need(
            Capability.RETAINS,
            because="it admits the chunk's experts into slots, and this cache has none",
            mend="cache=lru",
        ),
    )

    config: Config

    def __init__(self, config: Config, otherwise: PrefillMode) -> None:
        super().__init__(config)
        self.otherwise = otherwise
        self.learns, self.asks_router = otherwise.learns, otherwise.asks_router
        self.profile = otherwise.profile

    def requirements(self) -> tuple[Need, ...]:
        own = {need.capability for need in self.needs}
        others = self.otherwise.requirements()
        return (*self.needs, *(need for need in others if need.capability not in own))

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        yield from self.otherwise.faults()
        if self.config.max_tokens < 1:
            reason = "no chunk is that short, so nothing would ever be loaded by demand"
            key, mend = f"prefill.max_tokens={self.config.max_tokens}", "prefill.max_tokens=256"
            yield Conflict((key,), reason, mend)
        if isinstance(self.otherwise, Demand):
            reason = "longer chunks need a mode that takes any length"
            yield Conflict(("prefill.otherwise=demand",), reason, "prefill.otherwise=always_stream")

    def ahead(self, view: LayerView) -> Ahead:
        if view.num_tokens > self.config.max_tokens:
            return self.otherwise.ahead(view)
        return Ahead(Plan.of(len(view.resident), in_place=view.resident), waits=True)

    def plan(self, view: LayerView) -> Plan:
        if view.num_tokens > self.config.max_tokens:
            return self.otherwise.plan(view)
        return missing_plan(view)
