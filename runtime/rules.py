"""Rules: what the code of a policy must keep to, and the end of one that does not.

A breach becomes a PolicyError that names the part, its method and the rule; what a user can mend,
and memory that is used up, stay what they are. What is looked at here is known on the host, so
that no step waits for it.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import NoReturn

import torch

from residency.policies.base import Part
from residency.policies.cache import CachePolicy
from residency.policies.errors import PolicyError, ResidencyError
from residency.policies.step import IdSpace

HOST = (
    "no step reads a tensor's value on the host: no .item(), .nonzero(), boolean index or \"if "
    'tensor", nor a number assigned by index (a CUDA graph captures the step)'
)
STAYS = "state is updated in place: its tensors are those that allocate made"
NUMBERS = "state holds numbers: no division by zero, no log of what may be negative"
KEYS = "keys are int64, one for each id and one for the sink"
RULES = {
    "allocate": "it makes state for any number of ids, on the device that it is given",
    "refresh": "it brings keys up to date, in place and in fixed shapes",
    "admits": "it answers None, or a bool for each id; config and phase decide which of both",
    "moved": "it takes any ids, the sink too, as many as have entered and as have left",
    "touch": "it takes any ids, the sink too, and updates keys and state in place",
    "rebase": "it shifts remembered times in place",
    "restore": "it takes over a saved state, in place",
    "promoted": "it answers a number of the chunk's own tokens",
    "ahead": "it answers an Ahead, whose plan has four masks: bool [E] on the CPU",
    "plan": "it answers a Plan of four masks: bool [E] on the CPU",
    "quotas": "it answers Quotas: int [L, most + 1], of m missing experts from 0 to m, and steps",
}
# How torch says that an operation needs a value: of a tensor without any, or in a capture.
NEEDS_VALUE = re.compile(r"\bmeta\b|register_meta|captur", re.IGNORECASE)
ELSEWHERE = "same device"
MEMORY = (MemoryError, torch.OutOfMemoryError)


class Call:
    """Around a call of a part's method; what the method raises is a breach."""

    def __init__(self, part: Part, method: str) -> None:
        self.part = part
        self.method = method

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (ResidencyError, *MEMORY)):
            return
        if isinstance(error, Exception):
            what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            self.refuse(f"broke off with {what}", _rule_of(str(error)), error)

    def require(self, holds: bool, what: str, rule: str | None = None) -> None:
        if not holds:
            self.refuse(what, rule)

    def refuse(
        self, what: str, rule: str | None = None, error: Exception | None = None
    ) -> NoReturn:
        """rule: None for the method's own."""
        name = f"{self.part.group}={self.part.name}"
        raise PolicyError(
            f"{name}: {self.method} {what}; the rule: {rule or RULES[self.method]}"
        ) from error


class CacheRules:
    """Calls of one cache policy, and its state as `allocate` made it."""

    def __init__(self, policy: CachePolicy) -> None:
        self._policy = policy
        self._calls = {method: Call(policy, method) for method in RULES}

    def calling(self, method: str) -> Call:
        return self._calls[method]

    def begin(self, space: IdSpace, device: torch.device) -> None:
        """From now on the state stays where it is."""
        call, policy = self.calling("allocate"), self._policy
        keys = getattr(policy, "keys", None)
        call.require(isinstance(keys, torch.Tensor), "makes no keys", KEYS)
        self._keys = policy.keys
        made = f"{str(self._keys.dtype).removeprefix('torch.')} {list(self._keys.shape)}"
        fits = self._keys.dtype is torch.int64 and self._keys.shape == (space.num_ids + 1,)
        call.require(fits, f"makes keys of {made}, and there are {space.num_ids} ids", KEYS)
        with call:
            self._state = dict(policy.state())
        is_named = any(tensor is self._keys for tensor in self._state.values())
        call.require(is_named, "makes keys that state() does not name", STAYS)
        for name, tensor in self._state.items():
            where = tensor.device.type
            call.require(where == device.type, f"makes {name} on {where}, not on {device.type}")

    def check_keys(self, method: str) -> None:
        """After each call: nothing but a comparison."""
        if self._policy.keys is not self._keys:
            self.calling(method).refuse("puts other keys in the place of the old ones", STAYS)

    def check_state(self, method: str) -> None:
        """After some calls: each tensor of the state."""
        with self.calling(method):
            state = self._policy.state()
        for name in sorted({*state, *self._state}):
            if state.get(name) is not self._state.get(name):
                self.calling(method).refuse(f"puts another {name} in the place of the old", STAYS)

    def check_numbers(self) -> None:
        """At the end of a run: what is not a number ranks nothing."""
        for name, tensor in self._state.items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                self.calling("touch").refuse(f"makes NaN of {name}", NUMBERS)

    def check_admitted(self, admitted: torch.Tensor | None, ids: torch.Tensor) -> None:
        """What `admits` answered for `ids`."""
        if admitted is None:
            return
        call = self.calling("admits")
        is_mask = isinstance(admitted, torch.Tensor) and admitted.dtype is torch.bool
        call.require(is_mask, f"answers {_kind(admitted)}")
        call.require(
            admitted.shape == ids.shape, f"answers {list(admitted.shape)} for {list(ids.shape)} ids"
        )

    def check_promoted(self, promoted: int, num_tokens: int) -> None:
        fits = isinstance(promoted, int) and 0 <= promoted <= num_tokens
        what = f"answers {promoted} of a chunk of {num_tokens} tokens"
        self.calling("promoted").require(fits, what)


def _rule_of(text: str) -> str | None:
    """The rule that an error's text tells of; None for that of the method."""
    if ELSEWHERE in text:
        return RULES["allocate"]
    return HOST if NEEDS_VALUE.search(text) else None


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"
