"""The workload interface: a config option that runs something on an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from residency.policies.base import Conflict, Part
from residency.runtime.engine import Engine

if TYPE_CHECKING:
    from rich.table import Table


class Workload(Part, ABC):
    """What is run, and reported on."""

    group: ClassVar[str] = "workload"
    command: ClassVar[str] = "run"  # the one that runs it
    interactive: ClassVar[bool] = False  # whether it needs somebody at a terminal

    @property
    def batch(self) -> int:
        """Most sequences that it decodes together."""
        return 1

    @property
    def snapshots(self) -> int:
        """Most snapshots of a conversation that it keeps, of models that need some to go back."""
        return 0

    @property
    def routes_are_recorded(self) -> bool:
        """Whether `record` can stand for it: a trace is of one sequence at a time."""
        return self.batch == 1

    def context_faults(self, context: int) -> Iterator[Conflict]:
        """What needs more tokens than a sequence of the model may have."""
        return iter(())

    def record(self, engine: Engine) -> None:
        """Run what shows where its decode is routed, on an engine that records."""
        self.run(engine)

    @abstractmethod
    def run(self, engine: Engine, told: Callable[[str], None] | None = None) -> Any:
        """Run on `engine` and report; `told` hears of progress. Raises WorkloadError."""


class Measurement(Workload):
    """A workload whose report is numbers beside the limits of the machine, and a picture.

    Its reports have `as_dict()`, for result.json, and `notes`.
    """

    command: ClassVar[str] = "bench"

    @abstractmethod
    def tables(self, report: Any) -> list[Table]:
        """What a person reads on the terminal."""

    @abstractmethod
    def chart(self, report: Any) -> bytes:
        """The picture, as a PNG file's bytes."""
