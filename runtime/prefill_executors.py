"""The executors of the prefill modes that have run on one runtime, with what each has learnt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields

from residency.policies.errors import ConfigError
from residency.policies.prefill import PrefillMode
from residency.runtime.counters import Counters
from residency.runtime.experts import Maths
from residency.runtime.learning import Learning
from residency.runtime.prefill import PrefillExecutor
from residency.runtime.slots import SlotPool
from residency.runtime.staging import StagingRing
from residency.runtime.transfers import Transfers


class PrefillExecutors:
    """learning_of: what a mode starts to learn from. Lessons outlive slots and staging."""

    def __init__(
        self,
        learning_of: Callable[[PrefillMode], Learning],
        counters: Counters,
        host_layers: Collection[int],
    ) -> None:
        self._learning_of = learning_of
        self._counters = counters
        self._host_layers = host_layers
        self._learnt: dict[PrefillMode, Learning] = {}

    def equip(self, pool: SlotPool, ring: StagingRing, transfers: Transfers, maths: Maths) -> None:
        """What executors work on from now on."""
        self._parts = pool, ring, transfers, maths
        self._executors: dict[PrefillMode, PrefillExecutor] = {}

    def strip(self) -> None:
        """Let go of what `equip` gave, if it did."""
        for name in ("_parts", "_executors"):
            self.__dict__.pop(name, None)

    def of(self, mode: PrefillMode) -> PrefillExecutor:
        """The one that runs `mode`, with what it has learnt."""
        if mode not in self._learnt:
            self._learnt[mode] = self._learning_of(mode)
        if mode not in self._executors:
            self._executors[mode] = PrefillExecutor(
                mode, *self._parts, self._counters, self._learnt[mode], self._host_layers
            )
        return self._executors[mode]

    def save(self) -> None:
        """Keep what was learnt for the next run."""
        for learning in self._learnt.values():
            learning.save()


def require_same_staging(mode: PrefillMode, own: PrefillMode) -> None:
    """Raises ConfigError for a mode that cuts chunks or staging otherwise than the one there is."""
    for key in (field.name for field in fields(PrefillMode.Config)):
        theirs, ours = getattr(mode.config, key), getattr(own.config, key)
        if theirs != ours:
            raise ConfigError(
                f"prefill={mode.name}: its {key}={theirs} and that of the staging there is, "
                f"{ours}, must be equal"
            )
