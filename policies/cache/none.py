"""none: nothing stays, every expert crosses the link each time it is needed.

The floor under every other policy, and what a decode target without slots is combined with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from residency.policies.base import Conflict, Need
from residency.policies.cache.base import CachePolicy
from residency.policies.step import IdSpace, Phase, Step


class NoCache(CachePolicy):
    """Has no slots and admits nothing; misses are read from staging and forgotten."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """Nothing to set."""

    provides: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[Need, ...]] = ()

    def faults(self) -> Iterator[Conflict]:
        return iter(())

    @property
    def fills_memory(self) -> bool:
        return False

    def num_slots(self, space: IdSpace) -> int:
        return 0

    def promoted(self, num_tokens: int, behind: int) -> int:
        return 0

    def num_shares(self, space: IdSpace) -> int:
        return 1

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        """Remembers nothing."""

    def admits_in(self, phase: Phase) -> bool:
        return False
