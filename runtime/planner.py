"""The planner: memory plans for one model on one device, under any policies.

`cache.slots=auto` gets its number here: the most for which the whole plan fits into what is free.
"""

from __future__ import annotations

from bisect import bisect_left
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from residency.policies.errors import CapacityError
from residency.runtime.architecture import Architecture
from residency.runtime.batch_cache import check_batched
from residency.runtime.free_memory import SYSTEM_SHARE, Room
from residency.runtime.lessons import check_profile
from residency.runtime.memory import MemoryPlan, free_room, most_experts, plan_memory
from residency.runtime.weights import Weights

if TYPE_CHECKING:
    from residency.runtime.offload import Policies


class Planner:
    """context: most tokens of a sequence. batch: most sequences that are decoded together.
    snapshots: that a conversation keeps.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        device: torch.device,
        context: int,
        batch: int,
        snapshots: int = 0,
    ) -> None:
        self._architecture = architecture
        self._device = device
        self._context = context
        self.batch = batch
        self.snapshots = snapshots
        self._made_up = weights.made_up
        self._dequantised_bytes = weights.dequantised_bytes
        self._mapped_tables: bool | None = None  # None: not decided, for nothing is loaded

    def of(self, batch: int | None, snapshots: int | None) -> Planner:
        """Of the same model and device, with as much loaded; None leaves a number as it is."""
        other = copy(self)
        other.batch = self.batch if batch is None else batch
        other.snapshots = self.snapshots if snapshots is None else snapshots
        return other

    def settle(self, plan: MemoryPlan) -> None:
        """What `plan` says is loaded now."""
        self._mapped_tables = plan.mapped_tables

    @property
    def _loaded(self) -> bool:
        return self._mapped_tables is not None

    def plan(self, policies: Policies) -> MemoryPlan:
        """Of a number of slots; of the least that can run, where memory is to say how many.

        Raises ConfigError for what the model cannot use.
        """
        if self.batch > 1:
            check_batched(self._architecture.config)
        check_profile(policies.prefill)
        if policies.cache.fills_memory:
            policies = self._with_slots(policies, self._sizes(policies)[0])
        plan = plan_memory(
            self._architecture,
            policies,
            self._context,
            self.batch,
            self._dequantised_bytes,
            snapshots=self.snapshots,
            device=self._device,
        )
        if self._mapped_tables is not None:
            return replace(plan, mapped_tables=self._mapped_tables)
        return plan if self._made_up else plan.with_checkpoint_tables(self._device)

    def fitted(self, policies: Policies, *, held: int = 0) -> tuple[Policies, MemoryPlan]:
        """Policies with a number of slots, and their plan, which is not checked unless memory said
        the number. held: bytes where the slots are that will be free by then.

        Raises as `plan`, and CapacityError where not even the least that can run fits.
        """
        least = self.plan(policies)
        if not policies.cache.fills_memory:
            return policies, least
        banks = 0 if self._loaded else least.bank_bytes + least.read_table_bytes
        room = free_room(self._device).with_freed(held).beside_system(banks)
        self._require(least, room)
        sizes = self._sizes(policies)
        too_many = bisect_left(
            sizes, True, key=lambda num: not self._fits(self._with_slots(policies, num), room)
        )
        policies = self._with_slots(policies, sizes[too_many - 1])
        return policies, self.plan(policies)

    def notes(self, asked: Policies, plan: MemoryPlan) -> list[str]:
        """A line for a report, where memory said how many slots there are."""
        if not asked.cache.fills_memory:
            return []
        return [f"cache.slots=auto: {plan.num_slots:,} of {self._architecture.space.num_ids:,}"]

    def _sizes(self, policies: Policies) -> range:
        """The numbers of slots that can run, the least first."""
        space = self._architecture.space
        shares = policies.cache.num_shares(space)
        return range(most_experts(space, self.batch) * shares, space.num_ids + 1, shares)

    def _with_slots(self, policies: Policies, num_slots: int) -> Policies:
        return replace(policies, cache=policies.cache.sized(num_slots))

    def _fits(self, policies: Policies, room: Room) -> bool:
        demands = self.plan(policies).demands(room, loaded=self._loaded)
        return all(needed <= free for _, needed, free in demands)

    def _require(self, least: MemoryPlan, room: Room) -> None:
        """Raises CapacityError where the least does not fit."""
        left = f", with 1/{SYSTEM_SHARE} of what is free left to the system"
        for where, needed, free in least.demands(room, loaded=self._loaded):
            if needed > free:
                raise CapacityError(
                    f"cache.slots=auto: not even the {least.num_slots} slots that a decode step "
                    f"needs fit{left if room.device is None else ''}: "
                    f"{least.shortage(where, needed, free)}"
                )
