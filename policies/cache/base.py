"""The cache policy interface: a small tensor program that ranks expert ids.

A policy keeps state per global expert id, also for experts that are not resident. It sees ids and
its own tensors, never a slot, a stream or the model. The runtime looks up, chooses the victims by
`keys`, updates the maps and moves the bytes. Every method runs in fixed-shape tensor operations
without a host synchronisation, so that one object serves a captured CUDA graph, the CPU and replay.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from residency.policies.base import Capability, Conflict, Need, Part
from residency.policies.step import IdSpace, Phase, Step

SCOPES = ("global", "per_layer")
ALL = "all"
AUTO = "auto"

NEEDS_SLOT_DECODE = Need(
    Capability.DECODES_FROM_SLOTS,
    because="it ranks the experts in the slots, and this decode target never fills or reads them",
    mend="decode=gpu",
)


class CachePolicy(Part, ABC):
    """Ranks experts by an int64 key per id; the lowest (key, id) is evicted first."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """slots: experts the device holds, a number, a share of all experts ("25%"), "all", or
            "auto": as many as memory affords beside all else.
        scope: "global", where any expert may take any slot, or "per_layer", where each MoE layer
            has an equal share of the slots to itself.
        admit_prefill: whether experts that a prompt misses may enter slots.
        admit_decode: whether experts that decode misses may enter slots.
        prefill_tokens: how many of a prompt's last tokens are references, a number or "all"; the
            experts of earlier ones leave slots and history as they are.
        warm_start: a file that `residency run --save-state` wrote, whose slots and history this run
            begins with; "" begins with empty slots and none.
        """

        slots: int | str = "25%"
        scope: str = "global"
        admit_prefill: bool = True
        admit_decode: bool = True
        prefill_tokens: int | str = ALL
        warm_start: str = ""

    group: ClassVar[str] = "cache"
    provides: ClassVar[frozenset[str]] = frozenset({Capability.RETAINS})
    needs: ClassVar[tuple[Need, ...]] = (NEEDS_SLOT_DECODE,)
    horizon: ClassVar[int | None] = None  # tokens after which the runtime must call `rebase`
    # Names in `state` that a step of a prompt neither reads nor changes.
    decode_alone: ClassVar[frozenset[str]] = frozenset()
    follows_moves: bool = False  # whether the runtime must call `moved`; fixed by `allocate`

    config: Config

    def faults(self) -> Iterator[Conflict]:
        try:
            if not self.fills_memory:
                self.num_slots(IdSpace(1, 1, 1))
        except ValueError as error:
            yield Conflict((f"cache.slots={self.config.slots}",), str(error), 'cache.slots="25%"')
        if self.config.scope not in SCOPES:
            key, reason = f"cache.scope={self.config.scope}", f"it is {' or '.join(SCOPES)}"
            yield Conflict((key,), reason, "cache.scope=global")
        if not (self.config.admit_prefill or self.config.admit_decode):
            keys = ("cache.admit_prefill=false", "cache.admit_decode=false")
            yield Conflict(keys, "no expert would ever enter a slot", "cache.admit_decode=true")

        try:
            self.promoted(1, 0)
        except ValueError as error:
            key = f"cache.prefill_tokens={self.config.prefill_tokens}"
            yield Conflict((key,), str(error), f"cache.prefill_tokens={ALL}")

    def shape_faults(self, space: IdSpace) -> Iterator[Conflict]:
        """What in the config cannot work with a model of this shape."""
        if self.fills_memory:
            return
        num_slots, layers = self.num_slots(space), space.num_layers
        if num_slots % self.num_shares(space):
            key = f"cache.slots={self.config.slots}"
            reason = f"{num_slots} slots cannot be shared out evenly among {layers} MoE layers"
            fewer = max(num_slots // layers, 1) * layers
            yield Conflict((key, "cache.scope=per_layer"), reason, f"cache.slots={fewer}")

    def num_shares(self, space: IdSpace) -> int:
        """Equal parts that the slots are divided into: one, or one for each MoE layer in order."""
        return space.num_layers if self.config.scope == "per_layer" else 1

    @property
    def fills_memory(self) -> bool:
        """Whether `config.slots` leaves their number to memory. The runtime works on `sized` then;
        nothing else here has a number.
        """
        return str(self.config.slots).strip() == AUTO

    def sized(self, slots: int | str) -> Self:
        """The same policy with so many slots, without a state."""
        other, config = copy.copy(self), self.config
        other.config = replace(config, slots=slots)
        return other

    def num_slots(self, space: IdSpace) -> int:
        """The number of slots that `config.slots` asks for. Raises ValueError if it asks nothing.

        A share of all experts is rounded, to a multiple of the number of layers where each has its
        own slots. A number above the number of experts is taken as it is; the runtime refuses it.
        """
        asked = str(self.config.slots).strip()
        if asked == ALL:
            return space.num_ids
        if asked.endswith("%") and _is_number(asked[:-1]) and 0 < float(asked[:-1]) <= 100:
            shares = self.num_shares(space)
            each = round(space.num_ids // shares * float(asked[:-1]) / 100)
            return max(1, each) * shares
        if asked.isdecimal() and int(asked) > 0:
            return int(asked)
        if asked == AUTO:
            raise ValueError("how many slots that is, only the memory of a device can tell")
        raise ValueError(
            'it must be a number of experts above 0, a share like "25%", "all", or "auto"'
        )

    def promoted(self, num_tokens: int, behind: int) -> int:
        """How many of a chunk's tokens, counted from its end, are references: 0 to num_tokens.

        behind: tokens of the prompt that come after the chunk. The experts of the others are
        neither admitted nor touched. Raises ValueError if `config.prefill_tokens` says nothing.
        """
        asked = str(self.config.prefill_tokens).strip()
        if asked == ALL:
            return num_tokens
        if asked.isdecimal():
            return min(max(int(asked) - behind, 0), num_tokens)
        raise ValueError(f"it must be a number of tokens from 0 up, or {ALL}")

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        """Create the state for `space` on `device`, as if nothing had ever been touched.

        Subclasses extend it; every state tensor has num_ids + 1 rows, the last for the sink id.
        """
        self.space = space
        self.keys = torch.zeros(space.num_ids + 1, dtype=torch.int64, device=device)

    def state_bytes(self, space: IdSpace) -> int:
        """What `allocate` takes on a device: of all tensors that it makes, whatever they hold."""
        own = copy.copy(self)
        own.allocate(space, torch.device("meta"))
        return sum(each.nbytes for each in vars(own).values() if isinstance(each, torch.Tensor))

    @abstractmethod
    def touch(self, ids: torch.Tensor, step: Step) -> None:
        """Record a reference to `ids`: update `keys` and own state in place.

        ids: int64 [N] global ids, distinct apart from padding by the sink id. Called once for each
        step that routes to them, after admission, for hits and misses alike; in prefill with the
        experts of the chunk's promoted tokens, and not at all where it has none.
        """

    def refresh(self, step: Step) -> None:
        """Bring all keys up to date once per token, before its first layer, if ranks drift."""

    def admits(self, ids: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Which missing experts may enter the slots: bool [N], or None for all of them.

        ids: int64 [N] global ids, repeats and the sink id possible. Whether the answer is None may
        depend on the config and on `step.phase`, never on tensor values.
        """
        return None

    def admits_in(self, phase: Phase) -> bool:
        """Whether any missing expert may enter the slots in this phase, by the config alone."""
        config = self.config
        return config.admit_prefill if phase is Phase.PREFILL else config.admit_decode

    def welcomes(self, ids: torch.Tensor, step: Step) -> torch.Tensor | None:
        """What the runtime obeys: `admits`, and nothing in a phase that admits nothing."""
        if self.admits_in(step.phase):
            return self.admits(ids, step)
        return torch.zeros_like(ids, dtype=torch.bool)

    def moved(self, entered: torch.Tensor, evicted: torch.Tensor) -> None:
        """Follow what an admission did: some ids have entered slots, others have left them.

        entered, evicted: int64 [N] and [M] global ids, each distinct apart from padding by the
        sink id, in the order in which slots were given (M differs from N only where all slots are
        emptied at once). Called after each admission, before the step's touch, and only if
        `follows_moves`.
        """

    def rebase(self, tokens: int) -> None:
        """Shift every remembered time `tokens` into the past, in place; orders must not change."""

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that make up the policy's memory, by name, for saving and comparing."""
        return {name: value for name, value in vars(self).items() if _is_state(value, self.space)}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over a `state()` of a policy of the same config, but for its number of slots and
        what may enter them; in place. Tensors on the CPU, of the same names and shapes.
        """
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _is_state(value: object, space: IdSpace) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == space.num_ids + 1
