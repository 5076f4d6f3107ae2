"""The books of a chunk: each layer's counts, touches and lessons, kept when its routes are known.

Kept behind the device's work as far as nobody waits for them: a layer that admits experts needs
the touches of all layers before it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from residency.policies.step import Step
from residency.runtime.counters import Counters
from residency.runtime.lanes import Lanes, Reading
from residency.runtime.learning import Learning
from residency.runtime.slots import SlotPool
from residency.runtime.timeline import Track


class _Entry(NamedTuple):
    step: Step
    routes: Reading
    resident: torch.Tensor  # bool [E], before the layer admitted any


class Books:
    """Entries of layers, in order, on the way to the counters and to the policy."""

    def __init__(self, counters: Counters, learning: Learning, lanes: Lanes) -> None:
        self._lanes = lanes
        self._counters = counters
        self._learning = learning
        self._entries: deque[_Entry] = deque()

    def begin(self, maps: SlotPool, promoted: int) -> None:
        """maps: on the host. promoted: of a chunk's last tokens, how many are references."""
        self._maps = maps
        self._promoted = promoted

    def add(self, step: Step, routes: Reading, resident: torch.Tensor) -> None:
        self._entries.append(_Entry(step, routes, resident))

    def keep(self, *, wait: bool) -> None:
        """Enter what is known by now, or all."""
        while self._entries and (wait or self._entries[0].routes.arrival.passed()):
            self._enter(self._entries.popleft())

    def forget(self) -> None:
        self._entries.clear()

    def _enter(self, entry: _Entry) -> None:
        step, timeline = entry.step, self._lanes.timeline
        with timeline.during(Track.WAITS, "wait for routes", layer=step.layer):
            ids_TK = entry.routes.value()
        unique = self._maps.distinct(ids_TK.flatten(), step.layer)
        lookups = len(unique)
        hits = int(entry.resident[unique - step.layer * self._maps.space.num_experts].sum())
        counts = torch.tensor([lookups, hits, lookups - hits, 0])
        self._counters.count(step.layer, step.phase, counts)
        if self._promoted:
            if self._promoted < len(ids_TK):
                last = ids_TK[len(ids_TK) - self._promoted :]
                unique = self._maps.distinct(last.flatten(), step.layer)
            with timeline.during(Track.POLICY, "touch", layer=step.layer):
                self._maps.touch(unique, step)
        self._learning.routed(step.layer, ids_TK, lookups, lookups - hits)
