"""The prefill executor: runs any mode's plan, one layer of one chunk at a time.

A plan becomes lots, a lot is a set of experts and the rows they will lie in. Lots are issued
(copies start) ahead of being computed: of a plan made before the router, as many layers ahead as
the staging ring has buffers; of a plan that waits for the router, as far as the layer goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from residency.policies.errors import PolicyError
from residency.policies.prefill import LayerView, Plan, PrefillMode
from residency.policies.step import Phase, Step
from residency.runtime.admission import Placed
from residency.runtime.counters import Counters, Source
from residency.runtime.experts import Call, Maths, PartialSum
from residency.runtime.lanes import Mark
from residency.runtime.slots import SlotPool
from residency.runtime.staging import Buffer, StagingRing
from residency.runtime.transfers import Transfers


@dataclass(frozen=True)
class Lot:
    """Experts (ids within the layer) that are computed together once `ready` has passed.

    in_place: they lay in slots before.
    """

    experts: list[int]
    rows: list[int]
    ready: Mark
    buffer: Buffer | None = None
    in_place: bool = False


@dataclass(frozen=True)
class Pending:
    """A lot whose staging copy is planned but not issued."""

    layer: int
    experts: list[int]
    slots: list[int] | None  # copied from these slots, or from the bank when None


class PrefillExecutor:
    """Owns the order of copies and compute during prefill."""

    def __init__(
        self,
        mode: PrefillMode,
        pool: SlotPool,
        ring: StagingRing,
        transfers: Transfers,
        maths: Maths,
        counters: Counters,
        host_layers: Collection[int] = (),
    ) -> None:
        """host_layers: those whose slots decode does not read."""
        self.mode = mode
        self.host_layers = host_layers
        self.pool = pool
        self.ring = ring
        self.transfers = transfers
        self.maths = maths
        self.counters = counters
        self._group_size = -(-pool.space.num_experts // mode.config.groups)
        self._maps = pool
        self._ahead: Iterator[tuple[int, Lot | Pending]] = iter(())
        self._next: tuple[int, Lot | Pending] | None = None
        self._issued: deque[tuple[int, Lot]] = deque()
        self._books: Callable[[], None] | None = None

    def begin(self, num_tokens: int) -> None:
        """Start a chunk: copies that need not wait for a router begin now."""
        self._num_tokens = num_tokens
        self._token: torch.Tensor | None = None  # read once a chunk
        self._waits = self.mode.waits_for_router(num_tokens)
        self._start = self.transfers.lanes.mark()
        # A chunk whose layers the host plans one by one keeps the maps there meanwhile.
        self._maps = self.pool.on_host() if self._waits else self.pool
        if not self._waits:
            self._ahead = self._plan_ahead(self.pool.snapshot())
            self._pump()

    def end(self) -> None:
        assert not self._issued, f"{len(self._issued)} lots were issued and never computed"
        self._keep_books()
        self.pool.take(self._maps)
        self._maps = self.pool

    def abort(self) -> None:
        """Forget a chunk that was broken off, and what it has admitted."""
        self._books = None
        self._maps = self.pool
        self.ring.reset()
        self._abandon()

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """The layer's output [T, H]."""
        lanes, ids = self.transfers.lanes, call.ids_TK.flatten()
        # Behind all that reads slots which this layer may free.
        self._before = lanes.mark() if self._waits else Mark()
        routes = lanes.reading(ids) if self._waits else None  # ahead of the residents' compute
        work = self.maths.begin(call, self._residents(step.layer))
        self._keep_books()
        ids = ids if routes is None else routes.value()
        if self._token is None:
            self._token = step.token.to(self._maps.device)
        step = replace(step, token=self._token)
        unique = self._maps.distinct(ids, step.layer)
        resident = self._maps.slot_of[unique] >= 0
        if self._waits:
            self._plan_now(step, unique, work)
        self._run(step, work)
        self._books = lambda: self._record(step, unique, resident)
        out_TH: torch.Tensor = work.combined()
        return out_TH

    def _residents(self, layer: int) -> torch.Tensor | None:
        """Slots int32 [E] of experts that any plan reads in place, where the mode says so now."""
        if not (self._waits and self.mode.reads_in_place(self._num_tokens)):
            return None
        return self._maps.layer_slots(layer)

    def _keep_books(self) -> None:
        """The last layer's counts and touch, kept while the device computes the next one."""
        books, self._books = self._books, None
        if books is not None:
            books()

    def _record(self, step: Step, unique: torch.Tensor, resident: torch.Tensor) -> None:
        self._count_lookups(step, unique, resident)
        self._maps.touch(unique, step)

    def _count_lookups(self, step: Step, unique: torch.Tensor, resident: torch.Tensor) -> None:
        real = unique != self.pool.space.sink
        lookups, hits = real.sum(), (real & resident).sum()
        counts = torch.stack([lookups, hits, lookups - hits, torch.zeros_like(hits)])
        self.counters.count(step.layer, step.phase, counts)

    def _run(self, step: Step, work: PartialSum) -> None:
        """Compute the layer's lots as they are issued, issuing more as buffers come free."""
        self._pump()
        while self._issued and self._issued[0][0] == step.layer:
            self._compute(work, self._issued.popleft()[1])
            self._pump()

    # Plans made before the router: the residents of the whole chunk are known at its start, and
    # stay, because such a plan admits nothing.

    def _plan_ahead(self, slots: torch.Tensor) -> Iterator[tuple[int, Lot | Pending]]:
        for layer, slots_E in enumerate(slots[:-1].unflatten(0, (self.pool.space.num_layers, -1))):
            plan = self._checked(self._view(layer, slots_E, routed=None))
            for lot in self._staged(layer, plan, slots_E):
                yield layer, lot

    def _pump(self) -> None:
        """Issue planned lots in order while the ring has a buffer for the next one."""
        while (item := self._next or next(self._ahead, None)) is not None:
            layer, lot = item
            if isinstance(lot, Pending):
                buffer = self.ring.acquire()
                if buffer is None:
                    self._next = item
                    return
                lot = self._issue(lot, buffer)
            self._next = None
            self._issued.append((layer, lot))

    # Plans that wait for the router.

    def _plan_now(self, step: Step, unique: torch.Tensor, work: PartialSum) -> None:
        space = self.pool.space
        first = step.layer * space.num_experts
        routed = torch.zeros(space.num_experts, dtype=torch.bool)
        routed[unique - first] = True
        slots_E = self._maps.layer_slots(step.layer).clone()
        plan = self._checked(self._view(step.layer, slots_E, routed))
        if (declined := self._maps.declined(step)) is not None:
            plan = plan.streaming(declined)
        if not plan.admit.any():
            self._stage(step.layer, plan, slots_E)
            return
        # Copies come first: an admission may evict what they read.
        self._stage(step.layer, Plan.of(space.num_experts, copy=plan.copy), slots_E)
        self._run(step, work)
        self._admit_waves(step, work, plan)
        self._stage(step.layer, Plan.of(space.num_experts, stream=plan.stream), slots_E)

    def _stage(self, layer: int, plan: Plan, slots_E: torch.Tensor) -> None:
        self._ahead = iter([(layer, lot) for lot in self._staged(layer, plan, slots_E)])

    def _admit_waves(self, step: Step, work: PartialSum, plan: Plan) -> None:
        """Compute residents in place and admit the rest, as many experts at a time as fit.

        Residents come first, so none is evicted before it was used; each expert is loaded once.
        """
        needed = torch.tensor(_ids(plan.in_place) + _ids(plan.admit))
        after = self._before
        for wave in needed.split(max(1, self.pool.share_size)):
            admission = self._maps.admit(wave, step)
            self.counters.count_evictions(step.layer, step.phase, admission.counts)
            placed = Placed.of(admission, step.layer, self.pool.space)
            for lot in self._fetch(step.layer, placed, after):
                self._compute(work, lot)
            after = self.transfers.lanes.mark()

    def _fetch(self, layer: int, placed: Placed, after: Mark) -> list[Lot]:
        """Lots of one wave, hits first; the copies of all of them are issued before any compute.

        after: behind the last compute that reads the freed slots.
        """
        lots = [Lot(*placed.hits, Mark(), in_place=True)] if placed.hits.experts else []
        for start in range(0, len(placed.misses.experts), self._group_size):
            group = placed.misses.part(start, start + self._group_size)
            ready = self.transfers.fetch(layer, Phase.PREFILL, Source.FETCH, *group, after)
            lots.append(Lot(*group, ready))
        return lots

    # Both.

    def _view(self, layer: int, slots_E: torch.Tensor, routed: torch.Tensor | None) -> LayerView:
        from_slots = layer not in self.host_layers
        return LayerView(layer, self._num_tokens, slots_E >= 0, routed, from_slots)

    def _checked(self, view: LayerView) -> Plan:
        """The mode's plan, if it is one that can be run."""
        plan = self.mode.plan(view)
        in_place, copy, stream, admit, resident = (
            mask.numpy()
            for mask in (plan.in_place, plan.copy, plan.stream, plan.admit, view.resident)
        )
        named = np.add.reduce([in_place, copy, stream, admit], dtype=np.uint8)
        forgotten = named == 0 if view.routed is None else view.routed.numpy() & (named == 0)
        if view.routed is None and admit.any():
            self._refuse(view, "admits experts before the router has spoken")
        if named.max() > 1:
            self._refuse(view, f"names expert {named.argmax()} more than once")
        if forgotten.any():
            self._refuse(view, f"forgets expert {forgotten.argmax()}")
        if (absent := (in_place | copy) & ~resident).any():
            self._refuse(view, f"reads expert {absent.argmax()} from a slot it is not in")
        return plan

    def _refuse(self, view: LayerView, what: str) -> None:
        raise PolicyError(f"prefill={self.mode.name}: the plan for layer {view.layer} {what}")

    def _staged(self, layer: int, plan: Plan, slots_E: torch.Tensor) -> Iterator[Lot | Pending]:
        """Lots through staging, hits first, cut to the group size."""
        if plan.in_place.any():
            experts = _ids(plan.in_place)
            yield Lot(experts, slots_E[experts].tolist(), Mark(), in_place=True)
        for group in self._groups(plan.copy):
            yield Pending(layer, group, slots_E[group].tolist())
        for group in self._groups(plan.stream):
            yield Pending(layer, group, None)

    def _groups(self, mask: torch.Tensor) -> Iterator[list[int]]:
        experts = _ids(mask)
        for start in range(0, len(experts), self._group_size):
            yield experts[start : start + self._group_size]

    def _issue(self, lot: Pending, buffer: Buffer) -> Lot:
        rows = list(buffer.rows(len(lot.experts)))
        after = (self._start, buffer.free)
        if lot.slots is not None:
            ready = self.transfers.duplicate(lot.layer, Phase.PREFILL, lot.slots, rows, *after)
        else:
            ready = self.transfers.fetch(
                lot.layer, Phase.PREFILL, Source.STREAM, lot.experts, rows, *after
            )
        return Lot(lot.experts, rows, ready, buffer)

    def _compute(self, work: PartialSum, lot: Lot) -> None:
        if lot.in_place and work.has_residents:
            return
        self.transfers.lanes.wait(lot.ready)
        self.maths.run(work, lot.experts, lot.rows)
        if lot.buffer is not None:
            self.ring.release(lot.buffer)

    def _abandon(self) -> None:
        self._ahead = iter(())
        self._next = None
        self._issued.clear()


def _ids(mask: torch.Tensor) -> list[int]:
    ids: list[int] = np.flatnonzero(mask.numpy()).tolist()
    return ids
