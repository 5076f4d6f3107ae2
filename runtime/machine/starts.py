"""Starts: what a machine profile tells prefill=auto and decode=hybrid before their first step."""

from __future__ import annotations

from residency.policies.prefill import Costs
from residency.runtime.layout import RowLayout
from residency.runtime.machine.copies import ROW_BYTES
from residency.runtime.machine.measurement import (
    CHUNK_LAYER,
    GATHER,
    GATHER_BUSY,
    GATHER_ONE,
    HOST_TURN,
    LINK,
    LINK_BUSY,
    LINK_PAGEABLE,
    host_experts,
)
from residency.runtime.machine.profile import MachineProfile
from residency.runtime.rates import KnownLine, KnownRates


def assumed_costs(profile: MachineProfile, layout: RowLayout) -> Costs | None:
    """An expert over the link while the CPU is busy; the link idles as long as a layer of a small
    model takes, which larger ones exceed. None without a link's rate.
    """
    rate = profile.rate(LINK_BUSY, LINK, LINK_PAGEABLE)
    if rate is None:
        return None
    return Costs(layout.row_bytes / rate, profile.rate(CHUNK_LAYER) or 0.0)


def known_rates(profile: MachineProfile, layout: RowLayout) -> KnownRates | None:
    """Lines of both sides for experts of this layout. None where a side was not measured."""
    gather, form = profile.rate(GATHER), layout.format.name
    alone, beside = (profile.rate(host_experts(form, beside=b)) for b in (False, True))
    if gather is None or alone is None:
        return None
    one = profile.rate(GATHER_ONE) or gather
    late_s = max(0.0, ROW_BYTES / one - ROW_BYTES / gather)
    turn_s, size = profile.rate(HOST_TURN) or 0.0, layout.row_bytes
    busy = profile.rate(GATHER_BUSY) or gather
    return KnownRates(
        fetched=KnownLine(late_s, size / gather),
        computed=KnownLine(turn_s, size / alone),
        fetched_beside=KnownLine(late_s, size / min(busy, gather)),
        computed_beside=KnownLine(turn_s, size / min(beside or alone, alone)),
    )
