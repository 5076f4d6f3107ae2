"""Plans of prefill modes, checked before they are run: a plan that cannot be right is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import NoReturn

import numpy as np
import torch

from residency.policies.errors import PolicyError
from residency.policies.prefill import Ahead, LayerView, Plan, PrefillMode
from residency.runtime.rules import Call

BoolArray = np.ndarray
MASKS = tuple(field.name for field in fields(Plan))


def plan_ahead(mode: PrefillMode, view: LayerView) -> Ahead:
    """What `mode` does before the router speaks. Raises PolicyError if that cannot be run."""
    call = Call(mode, "ahead")
    with call:
        ahead = mode.ahead(view)
    call.require(isinstance(ahead, Ahead), f"answers a {type(ahead).__name__}")
    _require_masks(call, view, ahead.plan)
    named = _checked(mode, view, ahead.plan)
    if ahead.plan.admit.any():
        _refuse(mode, view, "admits experts before the router has spoken")
    if not (ahead.waits or named.all()):
        _refuse(mode, view, f"forgets expert {named.argmin()}")
    return ahead


def plan_rest(mode: PrefillMode, view: LayerView, ahead: Ahead) -> Plan:
    """What `mode` does when the router has spoken. Raises PolicyError if that cannot be run."""
    assert view.routed is not None and view.landed is not None, "the router has spoken"
    call = Call(mode, "plan")
    with call:
        plan = mode.plan(view)
    _require_masks(call, view, plan)
    named = _checked(mode, view, plan)
    landed = view.landed.numpy()
    read = ahead.plan.in_place.numpy() | landed
    twice = named & read & ~(plan.admit.numpy() & landed)
    if twice.any():
        _refuse(mode, view, f"names expert {twice.argmax()} more than once")
    forgotten = view.routed.numpy() & ~(named | read)
    if forgotten.any():
        _refuse(mode, view, f"forgets expert {forgotten.argmax()}")
    unwelcome = plan.admit.numpy() & ~view.welcome.numpy()
    if unwelcome.any():
        _refuse(mode, view, f"admits expert {unwelcome.argmax()}, which may not enter the slots")
    return plan


def _checked(mode: PrefillMode, view: LayerView, plan: Plan) -> BoolArray:
    """Which experts the plan names, each once; only residents are read from slots."""
    in_place, copy, stream, admit, resident = (
        mask.numpy() for mask in (plan.in_place, plan.copy, plan.stream, plan.admit, view.resident)
    )
    times = np.add.reduce([in_place, copy, stream, admit], dtype=np.uint8)
    if times.max() > 1:
        _refuse(mode, view, f"names expert {times.argmax()} more than once")
    if (absent := (in_place | copy) & ~resident).any():
        _refuse(mode, view, f"reads expert {absent.argmax()} from a slot it is not in")
    named: BoolArray = times > 0
    return named


def _require_masks(call: Call, view: LayerView, plan: Plan) -> None:
    call.require(isinstance(plan, Plan), f"answers a {type(plan).__name__} for a plan")
    shape = view.resident.shape
    for name in MASKS:
        mask = getattr(plan, name)
        fits = (
            isinstance(mask, torch.Tensor)
            and mask.dtype is torch.bool
            and mask.shape == shape
            and mask.device.type == "cpu"
        )
        call.require(fits, f"answers another kind of mask for {name}")


def _refuse(mode: PrefillMode, view: LayerView, what: str) -> NoReturn:
    raise PolicyError(f"prefill={mode.name}: the plan for layer {view.layer} {what}")


def ids_of(mask: torch.Tensor) -> list[int]:
    """The experts that a mask names, ascending."""
    ids: list[int] = np.flatnonzero(mask.numpy()).tolist()
    return ids
