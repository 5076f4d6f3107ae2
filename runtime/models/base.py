"""The model interface: a config option that gives an architecture, weights and routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from residency.policies.base import Conflict, Part
from residency.policies.errors import CheckpointError, ConfigError
from residency.runtime.architecture import Architecture
from residency.runtime.route_tables import MODEL, RouteTable, check_routing, routes_of
from residency.runtime.routing import Routing
from residency.runtime.weights import Weights


class Model(Part, ABC):
    """What is run: a shape, its weights, and who routes its tokens."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """dtype: auto (the model's own), bfloat16, float16, float32 or float64.
        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        routing: model (its own routers), even (every expert as likely), skewed (as uneven and as
            repetitive as recorded routes), or trace:FILE (recorded routes).
        """

        dtype: str = "auto"
        context: int = 0
        routing: str = MODEL

    group: ClassVar[str] = "model"
    config: Config

    @property
    @abstractmethod
    def architecture(self) -> Architecture:
        """Known without weights. Raises CheckpointError or ConfigError."""

    @abstractmethod
    def weights(self) -> Weights:
        """The supplier of the weights. Raises CheckpointError for a damaged checkpoint."""

    @property
    def seed(self) -> int:
        """Of everything that is made up."""
        return 0

    @property
    def context(self) -> int:
        return self.config.context or self.architecture.max_context

    @cached_property
    def _routes(self) -> RouteTable | None:
        return routes_of(self.config.routing, self.architecture.space, self.seed)

    def routing(self, device: torch.device) -> Routing | None:
        """What replaces the model's routes, on `device`. Raises ConfigError."""
        return None if self._routes is None else self._routes.on(device)

    def notes(self) -> list[str]:
        """Lines for the report, where not all is the model's own."""
        return [] if self._routes is None else [self._routes.note]

    def faults(self) -> Iterator[Conflict]:
        try:
            limit = self.architecture.max_context
        except CheckpointError as error:
            yield Conflict((f"model={self.name}",), str(error), "model=demo")
            return
        except ConfigError as error:
            yield _conflict(error, "model.dtype=auto")
            return
        if not 0 <= self.config.context <= limit:
            reason = f"the model takes contexts of 1 to {limit} tokens (0: its limit)"
            yield Conflict((f"model.context={self.config.context}",), reason, "model.context=0")
        try:
            check_routing(self.config.routing, self.architecture.space)
        except ConfigError as error:
            yield _conflict(error, f"model.routing={MODEL}")


def _conflict(error: ConfigError, mend: str) -> Conflict:
    key, _, reason = str(error).partition(": ")
    return Conflict((key,), reason, mend)
