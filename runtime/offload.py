"""The offload runtime: one device, its slots, staging, lanes and counters, under three policies.

It is what stands behind every experts module of the model. Nothing here is a process-wide
singleton, and expert ids are global while rows are local, so several devices can each have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import torch

from residency.policies.cache import CachePolicy
from residency.policies.decode import DecodeTarget
from residency.policies.errors import ConfigError, DeviceError
from residency.policies.prefill import PrefillMode
from residency.policies.step import Phase, Step
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters, Source
from residency.runtime.decode import DecodeExecutor
from residency.runtime.experts import Call, ExpertMath, Maths
from residency.runtime.faults import Health, Point, Work
from residency.runtime.host_experts import HostExperts
from residency.runtime.host_nodes import HostNodes
from residency.runtime.lanes import Lanes
from residency.runtime.learning import Chosen, Learning
from residency.runtime.memory import MemoryPlan
from residency.runtime.policy_probe import probe
from residency.runtime.prefill import PrefillExecutor
from residency.runtime.quotas import QuotaTable
from residency.runtime.recorder import RouteRecorder
from residency.runtime.routing import Routing
from residency.runtime.slots import SlotPool
from residency.runtime.staging import StagingRing
from residency.runtime.transfers import Transfers

if TYPE_CHECKING:
    from residency.runtime.kernels.formats import ExpertShape


class Executor(Protocol):
    """Runs the experts of one layer in one phase."""

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """What the experts add: [T, H]."""


class Decoder(Executor, Protocol):
    """Runs the experts of decode steps."""

    def prepare(self) -> None:
        """The host's part, before a step: the device is done with the last one."""

    def finish(self) -> None:
        """The device's part, behind the last layer of a step; a graph may capture it."""


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
        shape: ExpertShape | None = None,
        capturable: bool = True,
        table_reads: Iterable[tuple[int, int]] = (),
        host: HostExperts | None = None,
        learning_of: Callable[[PrefillMode], Learning] | None = None,
    ) -> None:
        """routing: replaces the model's routes; None leaves them.
        shape: the kernels' view of a row; None computes in plain torch.
        capturable: whether a graph may hold what the model does around its experts.
        table_reads: MoE layers beside a host table, and the bytes that a token reads of it.
        host: computes experts in their banks; None for plain torch, which no graph captures.
        learning_of: what a prefill mode starts to learn from; None for nothing.
        """
        space, layout = banks.space, banks.layout
        self.banks = banks
        self.policies = policies
        self.plan = plan
        self.routing = routing
        self.recorder: RouteRecorder | None = None
        self._table_reads = list(table_reads)
        probe(policies.cache, space)
        with Work(Point.POOL, plan, device):
            shape_of_rows = plan.num_rows, layout.row_bytes
            self.rows = torch.zeros(shape_of_rows, dtype=torch.uint8, device=device)
            self.lanes = Lanes(device)
            self.counters = Counters(space.num_layers, layout.row_bytes, device)
            self.pool = SlotPool(space, plan.num_slots, policies.cache, device)
        # Index of the last token seen, over the engine's life; the first token has index 0.
        self.clock = torch.full((), -1, dtype=torch.int64, device=device)
        self.tokens_seen = 0
        self.position = 0  # tokens of the sequence in flight that were seen before this step
        self.tokens_behind = 0  # tokens of the prompt in flight that come after this chunk
        self.begun_with: list[str] = []  # lines for a report, where it did not begin empty
        self._phase: Phase | None = None
        self.health = Health()
        transfers = Transfers(banks, self.rows, self.lanes, self.counters)
        ring = StagingRing(plan.num_slots, plan.ring, plan.group_size, self.lanes)
        maths: Maths = ExpertMath(layout, self.rows)
        self.quotas = QuotaTable(policies.decode, space, device)
        self._decode: Decoder = DecodeExecutor(
            self.quotas, self.pool, banks, transfers, maths, self.counters, host
        )
        self.capturable = self.decode_is_fused = False
        if shape is not None:
            from residency.runtime.fused import FusedMaths
            from residency.runtime.fused_decode import FusedDecode

            maths = FusedMaths(shape, self.rows, space.num_experts)
            beside = policies.decode.computes_on_host(space.num_layers)
            nodes = HostNodes.of(host, device) if beside else None
            if nodes is not None or not beside:
                self._decode = FusedDecode(
                    shape, self.pool, banks, self.rows, self.counters, self.quotas, nodes
                )
                self.capturable, self.decode_is_fused = capturable, True
        self._executor_parts = ring, transfers, maths
        self._learning_of = learning_of or (lambda mode: Learning(space, mode))
        self._executors: dict[PrefillMode, PrefillExecutor] = {}
        self._prefill = self._executor(policies.prefill)

    def _executor(self, mode: PrefillMode) -> PrefillExecutor:
        """The one that runs `mode`, with what it has learnt."""
        if mode not in self._executors:
            self._executors[mode] = PrefillExecutor(
                mode,
                self.pool,
                *self._executor_parts,
                self.counters,
                self._learning_of(mode),
                self.quotas.host_layers,
            )
        return self._executors[mode]

    @contextmanager
    def prefilling(self, mode: PrefillMode) -> Iterator[None]:
        """Inside, chunks are planned by `mode`; slots, staging and graphs stay as they are.

        Raises ConfigError for a mode that cuts chunks or staging otherwise than the runtime's own.
        """
        own, executor = self.policies, self._prefill
        for key in (field.name for field in fields(PrefillMode.Config)):
            theirs, ours = getattr(mode.config, key), getattr(own.prefill.config, key)
            if theirs != ours:
                raise ConfigError(
                    f"prefill={mode.name}: its {key}={theirs} and that of the staging there is, "
                    f"{ours}, must be equal"
                )
        self.policies, self._prefill = replace(own, prefill=mode), self._executor(mode)
        try:
            yield
        finally:
            self.policies, self._prefill = own, executor

    @contextmanager
    def step(self, phase: Phase, num_tokens: int, behind: int = 0) -> Iterator[None]:
        """One pass of the model over a chunk of a prompt, or over one token.

        behind: tokens of the prompt that come after the chunk.
        """
        self.tokens_behind = behind
        point = Point.PREFILL if phase is Phase.PREFILL else Point.DECODE
        with self.whole(point):
            self.prepare(phase, num_tokens)
            with self.recorded(phase, num_tokens):
                if phase is Phase.PREFILL:
                    promoted = self.pool.promoted(num_tokens, behind)
                    self._prefill.begin(num_tokens, self.tokens_seen - 1, promoted)
                yield
                if phase is Phase.PREFILL:
                    self._prefill.end()
        self.position += num_tokens

    @contextmanager
    def whole(self, point: Point) -> Iterator[None]:
        """Inside, a step runs to its end or is broken off; its faults are told as of `point`."""
        with Work(point, self.plan, self.lanes.device):
            try:
                yield
            except BaseException:
                self._break_off()
                raise

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around a whole generation: some faults are told only when the device is asked for a
        result. Raises DeviceError at once where nothing can run any more.
        """
        self.health.require()
        try:
            with Work(Point.GENERATE, self.plan, self.lanes.device):
                yield
                self.check()
        except DeviceError:
            self._break_off()
            raise
        self.health.require_same(self.banks)

    def prepare(self, phase: Phase, num_tokens: int) -> None:
        """The host's part of a step, due before each one, replayed steps included."""
        if phase is Phase.DECODE:
            self._decode.prepare()
        horizon = self.policies.cache.horizon
        if horizon is not None and self.tokens_seen + num_tokens >= horizon:
            self.pool.rebase(horizon // 2)
            self.clock -= horizon // 2
            self.tokens_seen -= horizon // 2
        self.tokens_seen += num_tokens
        for layer, num_bytes in self._table_reads:
            self.counters.moved(layer, phase, Source.TABLE, num_tokens * num_bytes)
        if self.recorder is not None:
            behind = self.tokens_behind if phase is Phase.PREFILL else 0
            self.recorder.begin(phase, num_tokens, behind)

    @contextmanager
    def recorded(self, phase: Phase, num_tokens: int) -> Iterator[None]:
        """The device's part of a step, which a graph may capture: the model is called inside."""
        self._phase = phase
        self.clock += num_tokens
        self.pool.refresh(Step(self.clock, 0, phase))
        try:
            yield
            if phase is Phase.DECODE:
                self._decode.finish()
        finally:
            self._phase = None

    def layer(self, layer: int, call: Call) -> torch.Tensor:
        """What the experts of MoE layer `layer` add, plus the residual, if any: [T, H]."""
        assert self._phase is not None, "the model was called outside of OffloadRuntime.step"
        executor: Executor = self._prefill if self._phase is Phase.PREFILL else self._decode
        step = Step(self.clock, layer, self._phase)
        if self.routing is not None:
            call = call._replace(ids_TK=self.routing.routes(step, call.ids_TK))
        if self.recorder is not None:
            self.recorder.record(step, call.ids_TK, call.weights_TK)
        out_TH = executor.layer(step, call)
        if self.recorder is not None and self._phase is Phase.PREFILL:
            self.recorder.note(layer, self._prefill.entering.entries())
        return out_TH

    def _break_off(self) -> None:
        """After a step that did not end: an expert may have its slot and not its bytes yet, so
        the slots are emptied; policies keep their memory. Raises DeviceError where that fails.
        """
        with self.health.undoing():
            self.lanes.synchronize()
            self._prefill.abort()
            self.pool.empty()

    def choices(self) -> list[Chosen]:
        """What the prefill mode chose, where it had a choice, since the last call."""
        return self._prefill.learning.take_choices()

    def close(self) -> None:
        """Keep what was learnt for the next run."""
        for executor in self._executors.values():
            executor.learning.save()

    def notes(self) -> list[str]:
        """Lines for a report, on what has run."""
        notes = [*self.begun_with, *self.quotas.notes(), *self.banks.notes()]
        beside = self.policies.decode.computes_on_host(self.banks.space.num_layers)
        if self.rows.device.type == "cuda" and beside and not self.capturable:
            notes.append("decode runs outside a graph: no native function computes these experts")
        return notes

    def forget(self) -> None:
        """Empty the slots and the policy's memory, as if nothing had ever run."""
        self.pool.clear()
        self.clock.fill_(-1)
        self.tokens_seen = 0

    def check(self) -> None:
        """Audit the maps and the counters. Raises PolicyError on any difference."""
        self.pool.check()
        self.counters.rows()
