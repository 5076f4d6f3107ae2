"""The offload runtime: one device, its slots, staging, lanes and counters, under three policies.

It is what stands behind every experts module of the model. Nothing here is a process-wide
singleton, and expert ids are global while rows are local, so several devices can each have one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from residency.policies.cache import CachePolicy
from residency.policies.decode import DecodeTarget
from residency.policies.errors import DeviceError
from residency.policies.prefill import PrefillMode
from residency.policies.step import Phase, Step
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters, Source
from residency.runtime.decode import DecodeExecutor
from residency.runtime.executors import Decoder, Executor
from residency.runtime.experts import Call, ExpertMath, Maths
from residency.runtime.faults import Health, Point, Work
from residency.runtime.host_experts import HostExperts
from residency.runtime.host_nodes import HostNodes
from residency.runtime.lanes import Lanes
from residency.runtime.learning import Chosen, Learning
from residency.runtime.memory import MemoryPlan
from residency.runtime.policy_probe import probe
from residency.runtime.prefill_executors import PrefillExecutors, require_same_staging
from residency.runtime.profile import Profile, Unprofiled
from residency.runtime.quotas import QuotaTable
from residency.runtime.rates import KnownRates
from residency.runtime.recorder import RouteRecorder
from residency.runtime.routing import Routing
from residency.runtime.slots import SlotPool
from residency.runtime.staging import StagingRing
from residency.runtime.timeline import Track
from residency.runtime.transfers import Transfers

if TYPE_CHECKING:
    from residency.runtime.kernels.formats import ExpertShape


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
        known_rates: KnownRates | None = None,
    ) -> None:
        """routing: replaces the model's routes; None leaves them.
        shape: the kernels' view of a row; None computes in plain torch.
        capturable: whether a graph may hold what the model does around its experts.
        table_reads: MoE layers beside a host table, and the bytes that a token reads of it.
        host: computes experts in their banks; None for plain torch, which no graph captures.
        learning_of: what a prefill mode starts to learn from; None for nothing.
        known_rates: what a decode target that splits starts with; None for nothing.
        """
        space, layout = banks.space, banks.layout
        self.banks = banks
        self.routing = routing
        self.recorder: RouteRecorder | None = None
        self.profile = Unprofiled()
        self._table_reads = list(table_reads)
        self.device = device
        self.lanes = Lanes(device)
        self.counters = Counters(space.num_layers, layout.row_bytes, device)
        # Index of the last token seen, over the engine's life; the first token has index 0.
        self.clock = torch.full((), -1, dtype=torch.int64, device=device)
        self.tokens_seen = 0
        self.position = 0  # tokens of the sequence in flight that were seen before this step
        self.tokens_behind = 0  # tokens of the prompt in flight that come after this chunk
        self.begun_with: list[str] = []  # lines for a report, where it did not begin empty
        self._phase: Phase | None = None
        self.health = Health()
        self.streams = self.lanes.streams()
        self.quotas = QuotaTable(policies.decode, space, device, known_rates)
        self._shape, self._host, self._may_capture = shape, host, capturable
        learning_of = learning_of or (lambda mode: Learning(space, mode))
        self._executors = PrefillExecutors(learning_of, self.counters, self.quotas.host_layers)
        self.equip(policies, plan)

    def equip(self, policies: Policies, plan: MemoryPlan) -> None:
        """Take slots and staging, all empty, and what works on them; the policy starts anew.

        Lanes, clock, counters and what prefill and decode have learnt are not of a size, and stay.
        """
        space, layout, device = self.banks.space, self.banks.layout, self.device
        probe(policies.cache, space)
        self.policies, self.plan = policies, plan
        with Work(Point.POOL, plan, device):
            sizes = plan.num_rows, layout.row_bytes
            self.rows = torch.zeros(sizes, dtype=torch.uint8, device=device)
            self.pool = SlotPool(space, plan.num_slots, policies.cache, device)
        transfers = Transfers(self.banks, self.rows, self.lanes, self.counters)
        ring = StagingRing(plan.num_slots, plan.ring, plan.group_size, self.lanes)
        maths: Maths = ExpertMath(layout, self.rows)
        self._decode: Decoder = DecodeExecutor(
            self.quotas, self.pool, self.banks, transfers, maths, self.counters, self._host
        )
        self.capturable = self.decode_is_fused = False
        if (shape := self._shape) is not None:
            from residency.runtime.fused import FusedMaths
            from residency.runtime.fused_decode import FusedDecode

            maths = FusedMaths(shape, self.rows, space.num_experts)
            beside = policies.decode.computes_on_host(space.num_layers)
            nodes = HostNodes.of(self._host, device) if beside else None
            if nodes is not None:
                self.streams |= nodes.streams()
            if nodes is not None or not beside:
                self._decode = FusedDecode(
                    shape, self.pool, self.banks, self.rows, self.counters, self.quotas, nodes
                )
                self.capturable, self.decode_is_fused = self._may_capture, True
        self._executors.equip(self.pool, ring, transfers, maths)
        self._prefill = self._executors.of(policies.prefill)

    def strip(self) -> None:
        """Let go of slots and staging, whose memory is free then; `equip` must follow.

        Graphs that were captured over them must be gone.
        """
        self.lanes.synchronize()
        for name in ("rows", "pool", "_decode", "_prefill"):
            self.__dict__.pop(name, None)  # some are missing where an `equip` broke off
        self._executors.strip()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def prefilling(self, mode: PrefillMode) -> Iterator[None]:
        """Inside, chunks are planned by `mode`; slots, staging and graphs stay as they are.

        Raises ConfigError for a mode that cuts chunks or staging otherwise than the runtime's own.
        """
        own = self.policies
        require_same_staging(mode, own.prefill)
        self.policies, self._prefill = replace(own, prefill=mode), self._executors.of(mode)
        try:
            yield
        finally:
            # As they are now: the slots may have been resized.
            self.policies = replace(self.policies, prefill=own.prefill)
            self._prefill = self._executors.of(own.prefill)

    @contextmanager
    def step(self, phase: Phase, num_tokens: int, behind: int = 0) -> Iterator[None]:
        """One pass of the model over a chunk of a prompt, or over one token.

        behind: tokens of the prompt that come after the chunk.
        """
        self.tokens_behind = behind
        self.lanes.begin()
        with self.whole(Point.PREFILL if phase is Phase.PREFILL else Point.DECODE):
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
        with self.lanes.timeline.during(Track.STEPS, "layer", layer=layer):
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
        self._executors.save()

    def notes(self) -> list[str]:
        """Lines for a report, on what has run."""
        notes = [*self.begun_with, *self.quotas.notes(), *self.profile.notes()]
        notes += self.banks.notes()
        beside = self.policies.decode.computes_on_host(self.banks.space.num_layers)
        if self.rows.device.type == "cuda" and beside and not self.capturable:
            notes.append("decode runs outside a graph: no native function computes these experts")
        return notes

    def profile_steps(self) -> None:
        """From now on, write down each call's last chunk of prompts and one of its decode steps."""
        self.profile = Profile(self.lanes, self.streams)

    def forget(self) -> None:
        """Empty the slots and the policy's memory, as if nothing had ever run."""
        self.pool.clear()
        self.clock.fill_(-1)
        self.tokens_seen = 0

    def check(self) -> None:
        """Audit the maps and the counters. Raises PolicyError on any difference."""
        self.pool.check()
        self.counters.rows()
