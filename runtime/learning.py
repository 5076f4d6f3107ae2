"""What a prefill executor learns while it runs, and what it asks early.

Chances and costs for modes that plan by them, guesses of routers for modes that ask for them, and
what was chosen, for the report. For other modes nothing is kept.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from residency.policies.prefill import Ahead, Choice, Costs, LayerView, PrefillMode
from residency.policies.step import IdSpace
from residency.runtime.chances import Chances
from residency.runtime.cost_profile import read_profile, write_profile
from residency.runtime.lanes import Mark
from residency.runtime.link_costs import ChunkTimes, LayerTimes, LinkCosts

NO_CHOICE = "fixed"
LACKED_CORRECTION = 0.3  # of the mean number of experts lacked, per layer of a chunk


class Router(Protocol):
    """Asks routers early."""

    def guess(self, layer: int, x_TH: torch.Tensor) -> torch.Tensor | None:
        """int64 [T, K]: what the router of MoE layer `layer + 1` says to the input of layer
        `layer`'s experts; None for the last layer.
        """


@dataclass(frozen=True)
class Chosen:
    """How often a mode went one way with chunks of one length.

    layers: of all such chunks. waits: for their routers.
    expected_s: by way, the mean seconds that a layer was expected to take.
    """

    num_tokens: int
    choice: str
    waits: bool
    layers: int
    expected_s: dict[str, float]

    @property
    def reason(self) -> str:
        if not self.expected_s:
            return "" if self.choice == NO_CHOICE else "nothing measured yet"
        ways = sorted(self.expected_s.items(), key=lambda item: item[0] != self.choice)
        return ", ".join(f"{way} {seconds * 1e3:.2f} ms a layer" for way, seconds in ways)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"reason": self.reason}


class Learning:
    """Serves one executor. router: None where guesses are worth nothing."""

    def __init__(
        self,
        space: IdSpace,
        mode: PrefillMode,
        router: Router | None = None,
        profile: Path | None = None,
        *,
        keeps: bool = True,
        copies_beside: bool = True,
        assumed: Costs | None = None,
    ) -> None:
        """copies_beside: whether copies run beside the compute. assumed: costs to begin with where
        the profile has none.
        """
        self.learns = mode.learns
        self._mode = mode
        self._lacked: dict[int, float] = {}  # by length of chunk, a power of two
        self._num_layers = space.num_layers
        self._router = router if mode.asks_router else None
        self._chances = Chances(space) if mode.learns else None
        self._profile = profile if mode.learns else None
        self._keeps = keeps
        known = read_profile(self._profile) if self._profile is not None else None
        self._costs = LinkCosts(known, beside=copies_beside, assumed=assumed)
        self._saved = self._costs.as_dict()
        self._times: ChunkTimes | None = None
        self._cycle = 0.0
        self._chosen: dict[tuple[int, str, bool], list[dict[str, float]]] = defaultdict(list)

    # One chunk.

    def begin(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        if self._chances is not None:
            layers = [LayerTimes() for _ in range(self._num_layers)]
            self._times = ChunkTimes(num_tokens, layers)
            self._cycle = self._chances.cycle(num_tokens)
            self._now = self._costs.of(num_tokens)

    def end(self) -> None:
        if self._times is not None:
            self._costs.observe(self._times)
            self._times = None

    def forget(self) -> None:
        """A chunk that was broken off taught nothing."""
        self._times = None

    def routes_known(self, layer: int, arrival: Mark) -> None:
        if self._times is not None:
            self._times.layers[layer].routes = arrival

    def heard(self, layer: int) -> None:
        """The host has the answer of a router that it waited for."""
        if self._times is not None:
            self._times.layers[layer].heard_s = time.perf_counter()

    def issued(self, layer: int) -> None:
        """The host has issued all of a layer."""
        if self._times is not None:
            self._times.layers[layer].issued_s = time.perf_counter()

    def copied(self, layer: int, num_experts: int, ready: Mark, *, waited: bool) -> None:
        """A copy over the link was issued. waited: for the layer's router."""
        if self._times is None:
            return
        times = self._times.layers[layer]
        self._times.copies.append((num_experts, ready))
        times.last = ready
        if not waited:
            times.ahead = ready
        elif times.first is None:
            times.first = ready

    def routed(self, layer: int, ids_TK: torch.Tensor, num_distinct: int, num_lacked: int) -> None:
        """A layer's routes, int64 [T, K] on the host. num_lacked: of the distinct experts."""
        if self._chances is None:
            return
        self._chances.learn(layer, ids_TK, num_distinct)
        size = len(ids_TK).bit_length()
        before = self._lacked.get(size, num_lacked)
        self._lacked[size] = before + LACKED_CORRECTION * (num_lacked - before)

    # What plans follow from.

    def told(self, view: LayerView, *, alone: bool) -> LayerView:
        """The view with what was learnt. alone: the layer shares its slots with no other."""
        if self._chances is None:
            return view
        lacked = self._lacked.get(view.num_tokens.bit_length(), math.inf)
        view = replace(view, cycle=self._cycle, costs=self._now, lacked=lacked)
        if not alone and not self._mode.wants_chances(view):
            return view
        chances = self._chances.of(view.layer, view.num_tokens, view.guessed)
        return replace(view, chances=chances, cycle=float(chances.sum()) if alone else self._cycle)

    def guess(self, layer: int, x_TH: torch.Tensor) -> torch.Tensor | None:
        return None if self._router is None else self._router.guess(layer, x_TH)

    # The report.

    def chose(self, ahead: Ahead) -> None:
        choice = ahead.choice or Choice(NO_CHOICE)
        entry = self._chosen[self._num_tokens, choice.name, ahead.waits]
        entry.append(dict(choice.expected_s))

    def take_choices(self) -> list[Chosen]:
        """Since the last call, by length and way."""
        chosen = [
            Chosen(*key, len(entries), _means(entries))
            for key, entries in sorted(self._chosen.items())
        ]
        self._chosen.clear()
        return chosen

    def save(self) -> None:
        """Keep the costs for the next run."""
        if not self._keeps:
            return
        costs = self._costs.as_dict()
        if self._profile is None or costs == self._saved or costs["expert_s"] is None:
            return
        write_profile(self._profile, costs)
        self._saved = costs


def _means(entries: list[dict[str, float]]) -> dict[str, float]:
    """By way, over the entries that name it."""
    by_way: dict[str, list[float]] = defaultdict(list)
    for entry in entries:
        for way, seconds in entry.items():
            by_way[way].append(seconds)
    return {way: fmean(seconds) for way, seconds in sorted(by_way.items())}
