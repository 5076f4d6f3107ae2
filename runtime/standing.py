"""What stands over a loaded model: a runtime and the sequences on it. Others can take their place
without anything being loaded anew.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from residency.runtime.architecture import Architecture
from residency.runtime.hooks import attach, detach
from residency.runtime.lessons import Lessons
from residency.runtime.loaded import Loaded
from residency.runtime.memory import MemoryPlan
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.planner import Planner
from residency.runtime.resizing import resize
from residency.runtime.routing import Routing
from residency.runtime.sequences import Sequences
from residency.runtime.state_file import warm_start


class Standing:
    """runtime, sequences: those of now. sizing: lines for a report, on the number of slots."""

    def __init__(
        self,
        architecture: Architecture,
        loaded: Loaded,
        lessons: Lessons,
        planner: Planner,
        routing: Routing | None,
    ) -> None:
        """Nothing stands before the first `install`."""
        self._architecture = architecture
        self._loaded = loaded
        self._lessons = lessons
        self.planner = planner
        self._routing = routing

    def install(self, policies: Policies, plan: MemoryPlan, sizing: Sequence[str] = ()) -> None:
        """Stand a runtime under these policies behind the model's experts."""
        loaded = self._loaded
        self.sizing = list(sizing)
        self.runtime = OffloadRuntime(
            loaded.banks,
            policies,
            plan,
            loaded.device,
            self._routing,
            shape=loaded.shape,
            capturable=loaded.capturable,
            table_reads=self._architecture.table_reads,
            host=loaded.host_for(policies.decode),
            learning_of=self._lessons.of,
            known_rates=self._lessons.known_rates,
        )
        masked = loaded.takes_masks
        self.sequences = Sequences(loaded.model, self.runtime, self.planner.batch, masked=masked)
        attach(loaded.model, self._architecture.expert_modules, self.runtime)
        warm_start(self.runtime)

    def uninstall(self) -> None:
        """Let go of the runtime, if there is one, and the memory of its slots."""
        if not hasattr(self, "runtime"):
            return
        detach(self._loaded.model, self._architecture.expert_modules)
        self.sequences.forget()
        self.runtime.close()
        del self.runtime, self.sequences
        gc.collect()
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def rebuild(self, policies: Policies, batch: int | None, snapshots: int | None) -> None:
        """As `Engine.rebuild`."""
        planner = self.planner.of(batch, snapshots)
        planner.plan(policies)  # refuses what no memory could mend
        self.uninstall()
        asked, (policies, plan) = policies, planner.fitted(policies)
        plan.check(self._loaded.device, loaded=True)
        self.planner = planner
        self.install(policies, plan, planner.notes(asked, plan))

    @contextmanager
    def reconfigured(self, policies: Policies) -> Iterator[None]:
        """As `Engine.reconfigured`."""
        old = self.runtime.policies, self.runtime.plan, self.sizing
        try:
            self.rebuild(policies, None, None)
            yield
        finally:
            if not hasattr(self, "runtime") or self.runtime.plan is not old[1]:
                self.uninstall()
                self.install(*old)

    def resize(self, slots: int | str) -> None:
        """As `Engine.resize`."""
        told = resize(self.runtime, self.planner, self.sequences.all, slots)
        self.sizing = told or self.sizing
