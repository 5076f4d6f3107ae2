"""How a prefill layer's experts entered the slots, told so that a replay can do the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from residency.policies.prefill import LayerView
from residency.runtime.prefill_plans import ids_of


class Entries(NamedTuple):
    """Experts by their ids within the layer, ascending.

    admits: whether missing experts could enter at all. passed: those that missed, and were welcome,
    and were read in passing. landed: those that entered from staging, and so before the others.
    """

    admits: bool
    passed: list[int]
    landed: list[int]


@dataclass
class Entering:
    """Filled while one layer runs.

    admits: as `Entries`. view: what the mode's plan was made of, None where all was read in place.
    landed, fetched: what entered, from staging and over the link.
    """

    admits: bool
    view: LayerView | None = None
    landed: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)

    def entries(self) -> Entries:
        if self.view is None or not self.admits:
            return Entries(self.admits, [], [])
        assert self.view.routed is not None, "the router has spoken"
        passed = self.view.routed & ~self.view.resident & self.view.welcome
        passed[[*self.landed, *self.fetched]] = False
        return Entries(self.admits, ids_of(passed), sorted(self.landed))
