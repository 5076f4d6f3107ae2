"""The offload runtime: one device, its slots, staging, lanes and counters, under three policies.

It is what stands behind every experts module of the model. Nothing here is a process-wide
singleton, and expert ids are global while rows are local, so several devices can each have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from residency.policies.cache import CachePolicy
from residency.policies.decode import DecodeTarget
from residency.policies.prefill import PrefillMode
from residency.policies.step import Phase, Step
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters
from residency.runtime.decode import DecodeExecutor
from residency.runtime.experts import ExpertMath, Work
from residency.runtime.lanes import Lanes
from residency.runtime.memory import MemoryPlan
from residency.runtime.prefill import PrefillExecutor
from residency.runtime.routing import Routing
from residency.runtime.slots import SlotPool
from residency.runtime.staging import StagingRing
from residency.runtime.transfers import Transfers


@dataclass(frozen=True)
class Policies:
    """One combination: what `residency validate` checks and the runtime obeys."""

    cache: CachePolicy
    prefill: PrefillMode
    decode: DecodeTarget


class OffloadRuntime:
    """Runs the experts of every MoE layer of one model on one device."""

    def __init__(
        self,
        banks: Banks,
        policies: Policies,
        plan: MemoryPlan,
        device: torch.device,
        routing: Routing | None = None,
    ) -> None:
        """routing: replaces the model's routes; None leaves them."""
        space, layout = banks.space, banks.layout
        self.banks = banks
        self.policies = policies
        self.plan = plan
        self.routing = routing
        self.rows = torch.zeros(plan.num_rows, layout.row_bytes, dtype=torch.uint8, device=device)
        self.lanes = Lanes(device)
        self.counters = Counters(space.num_layers, device)
        self.pool = SlotPool(space, plan.num_slots, policies.cache, device)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        self._tokens_seen = 0
        transfers = Transfers(banks, self.rows, self.lanes, self.counters)
        maths = ExpertMath(layout, self.rows)
        ring = StagingRing(plan.num_slots, plan.ring, plan.group_size, self.lanes)
        self._prefill = PrefillExecutor(
            policies.prefill, self.pool, ring, transfers, maths, self.counters
        )
        self._decode = DecodeExecutor(
            policies.decode, self.pool, banks, transfers, maths, self.counters
        )
        self._phase: Phase | None = None

    @contextmanager
    def step(self, phase: Phase, num_tokens: int) -> Iterator[None]:
        """One pass of the model over a chunk of a prompt, or over one token."""
        self._advance_clock(num_tokens)
        self._phase = phase
        self.policies.cache.refresh(Step(self.clock, 0, phase))
        try:
            if phase is Phase.PREFILL:
                self._prefill.begin(num_tokens)
            yield
            if phase is Phase.PREFILL:
                self._prefill.end()
        except BaseException:
            self._prefill.abort()
            raise
        finally:
            self._phase = None

    def layer(
        self, layer: int, module: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: Any
    ) -> torch.Tensor:
        """What the experts of MoE layer `layer` add for the routing given: [T, H]."""
        assert self._phase is not None, "the model was called outside of OffloadRuntime.step"
        executor = self._prefill if self._phase is Phase.PREFILL else self._decode
        step = Step(self.clock, layer, self._phase)
        if self.routing is not None:
            ids_TK = self.routing.routes(step, ids_TK)
        return executor.layer(step, Work(module, x_TH, ids_TK, weights_TK))

    def forget(self) -> None:
        """Empty the slots and the policy's memory, as if nothing had ever run."""
        self.pool.clear()
        self.clock.zero_()
        self._tokens_seen = 0

    def check(self) -> None:
        """Audit the maps and the counters. Raises PolicyError on any difference."""
        self.pool.check()
        self.counters.rows()

    def _advance_clock(self, num_tokens: int) -> None:
        horizon = self.policies.cache.horizon
        if horizon is not None and self._tokens_seen + num_tokens >= horizon:
            self.policies.cache.rebase(horizon // 2)
            self.clock -= horizon // 2
            self._tokens_seen -= horizon // 2
        self._tokens_seen += num_tokens
        self.clock += num_tokens
