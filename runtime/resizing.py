"""Resizing: another number of slots under the same policy, while the model stays loaded.

The old pool goes before the new one is taken, so that the larger of both is all the memory that is
needed; experts that stay are copied from the banks once more.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from residency.policies.errors import CapacityError, ConfigError
from residency.runtime.memory import MemoryPlan
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.planner import Planner
from residency.runtime.slot_state import SlotState

MEMORY = (MemoryError, RuntimeError)  # torch's allocators raise both


class Rows(Protocol):
    """Sequences whose decode steps work on the slots."""

    @property
    def num_bytes(self) -> int:
        """What their caches have taken."""

    def renew(self) -> None:
        """Capture the steps anew; what the sequences hold stays."""


def resize(
    runtime: OffloadRuntime, planner: Planner, rows: Sequence[Rows], slots: int | str
) -> list[str]:
    """Run on with as many slots as `cache.slots` would say; lines for a report, none for no change.

    The policy's history stays, and the residents of the highest (key, id), as many as fit. Raises
    ConfigError for what the model or the policy cannot use, CapacityError for memory that does not
    suffice; all is as before then. Memory can still be lost to others after it was found free: the
    old pool is taken again then, or, if that fails as well, the error says so.
    """
    now, cache = runtime.plan, runtime.policies.cache
    if not hasattr(cache.config, "slots"):
        raise ConfigError(f"resize to {slots}: cache={cache.name} has no slots")
    asked = replace(runtime.policies, cache=cache.sized(slots))
    for fault in asked.cache.faults():
        raise ConfigError(str(fault))
    held = runtime.rows.nbytes + now.policy_bytes + sum(each.num_bytes for each in rows)
    policies, plan = planner.fitted(asked, held=held)
    if plan.device_bytes > now.device_bytes:
        plan.check(runtime.device, loaded=True, held=held)
    if plan.num_slots == now.num_slots:
        return []
    for each in rows:
        each.renew()
    return [*planner.notes(asked, plan), _resized(runtime, policies, plan)]


def _resized(runtime: OffloadRuntime, policies: Policies, plan: MemoryPlan) -> str:
    """A line for a report."""
    start = time.perf_counter()
    old, old_plan, state = runtime.policies, runtime.plan, SlotState(runtime)
    try:
        held = _move(runtime, policies, plan, state)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they would keep what was taken by then
        try:
            _move(runtime, old, old_plan, state)
        except BaseException as second:
            raise CapacityError(
                f"cache.slots={plan.num_slots}: {_reason(error)}; then {old_plan.num_slots} slots, "
                f"as before, could not be had either ({_reason(second)}): this engine has no slots "
                "any more, close it"
            ) from error
        if isinstance(error, (*MEMORY, CapacityError)):
            raise CapacityError(
                f"cache.slots={plan.num_slots}: {_reason(error)}; the {old_plan.num_slots} slots "
                "there were run on, with what they held"
            ) from error
        raise
    seconds, num_bytes = time.perf_counter() - start, held * plan.row_bytes
    return (
        f"resized from {old_plan.num_slots:,} to {plan.num_slots:,} slots: {held:,} of "
        f"{state.num_held:,} residents stayed, {num_bytes:,} bytes in {seconds:.3f} s, which no "
        "other figure counts"
    )


def _move(runtime: OffloadRuntime, policies: Policies, plan: MemoryPlan, state: SlotState) -> int:
    """Experts that are in slots then."""
    runtime.strip()
    runtime.equip(policies, plan)
    state.put_back(runtime)
    pool = runtime.pool
    return int((pool.id_of != pool.space.sink).sum())


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    if isinstance(error, CapacityError):
        return lines[0]
    what = "memory does not suffice" if isinstance(error, MEMORY) else type(error).__name__
    return f"{what} ({lines[0]})" if lines else what
