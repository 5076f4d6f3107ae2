"""What every part of a combination is: a named class with a typed config and declared needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from residency.policies.errors import one_line


class Capability(StrEnum):
    """What parts give one another. A plugin may use strings of its own beside these."""

    DECODES_FROM_SLOTS = "decodes_from_slots"  # decode reads experts from the device's slots
    RETAINS = "retains"  # experts stay in slots from one step to the next
    KNOWS_FUTURE = "knows_future"  # a recorded run is replayed, whose routes are all known
    READS_TEXT = "reads_text"  # the model has a tokenizer and trained weights


@dataclass(frozen=True)
class Need:
    """A capability that another part of the combination must provide.

    because: why this part cannot work without it, as a clause that follows its name.
    mend: the override that provides it, e.g. "decode=gpu".
    """

    capability: str
    because: str
    mend: str


@dataclass(frozen=True)
class Conflict:
    """One reason why a combination cannot work, and the change that mends it."""

    keys: tuple[str, ...]
    reason: str
    mend: str

    def concerns(self, groups: tuple[str, ...]) -> bool:
        """Whether a key of one of `groups` is part of the conflict."""
        return any(key.partition("=")[0].partition(".")[0] in groups for key in self.keys)

    def __str__(self) -> str:
        return one_line(f"{' with '.join(self.keys)}: {self.reason}; mend it with {self.mend}")


class Part:
    """One choice of a config group: a policy, a device, a model or a workload.

    Its module's name is the option's name, and `Config` is the schema of the option's keys.
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """Parameters that a user may set."""

    group: ClassVar[str]
    provides: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[Need, ...]] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def requirements(self) -> tuple[Need, ...]:
        """What this part needs of the combination, the needs of parts within it included."""
        return self.needs

    def faults(self) -> Iterator[Conflict]:
        """Values of this part's own config that cannot work, whatever it is combined with."""
        return iter(())
