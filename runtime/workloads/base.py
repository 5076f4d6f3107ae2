"""The workload interface: a config option that runs something on an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from residency.policies.base import Part
from residency.runtime.engine import Engine


class Workload(Part, ABC):
    """What is run, and reported on."""

    group: ClassVar[str] = "workload"

    @property
    def batch(self) -> int:
        """Most sequences that it decodes together."""
        return 1

    @abstractmethod
    def run(self, engine: Engine, told: Callable[[str], None] | None = None) -> Any:
        """Run on `engine` and report; `told` hears of progress. Raises WorkloadError."""
