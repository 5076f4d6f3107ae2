"""The prefill executor: runs any mode's plans, one layer of one chunk at a time.

Plans become lots: a lot is a set of experts and the rows they will lie in. Lots are issued (their
copies start) ahead of being computed: those of `PrefillMode.ahead` as many layers ahead as the
staging ring has buffers, up to the first layer that waits for its router; the rest of that layer
when the router has spoken, before anything of the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from residency.policies.prefill import Ahead, Plan, PrefillMode
from residency.policies.step import Step
from residency.runtime.admission import Placed
from residency.runtime.counters import Counters, Source
from residency.runtime.experts import Call, Maths, PartialSum
from residency.runtime.lanes import Mark, Reading
from residency.runtime.learning import Learning
from residency.runtime.lots import Lot, Pending, rows_of, staged
from residency.runtime.prefill_books import Books
from residency.runtime.prefill_copies import ChunkCopies
from residency.runtime.prefill_entries import Entering
from residency.runtime.prefill_plans import ids_of, plan_ahead, plan_rest
from residency.runtime.prefill_views import Views
from residency.runtime.slots import SlotPool
from residency.runtime.staging import StagingRing
from residency.runtime.timeline import Track
from residency.runtime.transfers import Transfers


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
        learning: Learning,
        host_layers: Collection[int] = (),
    ) -> None:
        """host_layers: those whose slots decode does not read."""
        self.mode = mode
        self.pool = pool
        self.transfers = transfers
        self.maths = maths
        self.counters = counters
        self.learning = learning
        self.views = Views(learning, host_layers)
        self._books = Books(counters, learning, transfers.lanes)
        self._maps = pool
        self._group_size = -(-pool.space.num_experts // mode.config.groups)
        self.copies = ChunkCopies(ring, transfers, learning, self._group_size)
        # Where the host copies itself it would plan no earlier.
        self._at_once = self.copies.lot_size if transfers.lanes.copies_beside else 0
        self._abandon()

    def begin(self, num_tokens: int, last_token: int, promoted: int) -> None:
        """Start a chunk: copies that need not wait for a router begin now.

        last_token: index of the chunk's last token. promoted: of its last tokens, how many are
        references; the experts of the others leave slots and history as they are.
        """
        self._token = torch.tensor(last_token)
        self.copies.begin()
        # The host plans a chunk layer by layer, so it has the maps meanwhile.
        self._maps = self.pool.on_host()
        self.learning.begin(num_tokens)
        self._books.begin(self._maps, promoted)
        self.views.begin(self._maps, self._token, num_tokens, promoted)
        self._next_layer, self._open = 0, True
        self._pump()

    def end(self) -> None:
        assert not (self._issued or self._pending), "lots were planned and never computed"
        self._books.keep(wait=True)
        self.learning.end()
        self.pool.take(self._maps, prompts=True)

    def abort(self) -> None:
        """Forget a chunk that was broken off, and what it has admitted."""
        self._books.forget()
        self.learning.forget()
        self.copies.reset()
        self._abandon()

    def _abandon(self) -> None:
        self._ahead: deque[Ahead] = deque()
        self._pending: deque[Pending] = deque()
        self._issued: deque[Lot] = deque()
        self._next_layer, self._open = 0, False

    def layer(self, step: Step, call: Call) -> torch.Tensor:
        """The layer's output [T, H]."""
        layer, lanes = step.layer, self.transfers.lanes
        step = replace(step, token=self._token)
        ahead = self._ahead.popleft()
        self.entering = Entering(ahead.waits and layer not in self.views.host_layers)
        slots_E = self._maps.layer_slots(layer)
        resident_E = slots_E >= 0
        before = lanes.mark()  # behind all that reads slots which this layer may free
        routes = lanes.reading(call.ids_TK)  # ahead of the residents' compute
        guess = self._ask_router(layer, call) if ahead.waits else None
        in_place = ahead.plan.in_place
        read_E = torch.where(in_place, slots_E, -1) if in_place.any() else None
        with lanes.timeline.computing("residents", layer=layer):
            work: PartialSum = self.maths.begin(call, read_E)
        self.learning.routes_known(layer, routes.arrival)
        if ahead.waits:
            self._fetch_rest(step, work, ahead, routes, before)
            self.views.guessed(layer + 1, guess)
            self._open = True
        else:
            self._books.keep(wait=False)
        self._books.add(step, routes, resident_E)
        self._run(layer, work)
        with lanes.timeline.computing("sum", layer=layer):
            out_TH: torch.Tensor = work.combined()
        self.learning.issued(layer)
        return out_TH

    def _ask_router(self, layer: int, call: Call) -> Reading | None:
        """On its way: the next layer's routes, guessed from this one's state, int64 [T, K]."""
        ids_TK = self.learning.guess(layer, call.x_TH)
        return None if ids_TK is None else self.transfers.lanes.reading(ids_TK)

    # Ahead of the router.

    def _look_ahead(self) -> bool:
        """Plan one more layer; False where none can be planned yet."""
        layer = self._next_layer
        if not self._open or layer == self.pool.space.num_layers:
            return False
        self._next_layer += 1
        # What lies in its slot now stays there until it is computed: only layers that wait admit
        # experts, and nothing behind such a layer is planned before it has.
        with self.transfers.lanes.timeline.during(Track.WAITS, "plan ahead", layer=layer):
            ahead = plan_ahead(self.mode, self.views.before(layer))
        self.learning.chose(ahead)
        self._open = not ahead.waits
        self._ahead.append(ahead)
        self._pending.extend(self._staged(layer, ahead.plan, waited=False))
        return True

    def _pump(self) -> None:
        """Issue planned lots in order while staging has room for the next one."""
        while self._pending or self._look_ahead():
            if self._pending:
                lot = self.copies.stage(self._pending[0])
                if lot is None:
                    return
                self._pending.popleft()
                self._issued.append(lot)

    # Once the router has spoken.

    def _fetch_rest(
        self, step: Step, work: PartialSum, ahead: Ahead, routes: Reading, before: Mark
    ) -> None:
        """Issue what `ahead` left; compute meanwhile only what stands in the way of it."""
        layer, timeline = step.layer, self.transfers.lanes.timeline
        self._pending.clear()  # what is not on its way by now waits for the answer
        with timeline.during(Track.WAITS, "wait for the router", layer=layer):
            ids_TK = routes.value()
        self.learning.heard(layer)
        routed = self.views.mask(ids_TK)
        if self._issued:
            self._keep_routed(layer, routed)
        self._start_at_once(layer, routed)
        self._books.keep(wait=True)
        landed = rows_of(self._issued)  # in staging or on their way, all of this layer
        if not landed and not (routed & ~ahead.plan.in_place).any():
            return  # all of it is read in place
        self.entering.view = view = self.views.behind(ids_TK, routed, list(landed))
        with timeline.during(Track.WAITS, "plan", layer=layer):
            plan = plan_rest(self.mode, view, ahead)
        if plan.copy.any():  # first: an admission may evict what they read
            copied = Plan.of(len(routed), copy=plan.copy)
            self._pending.extend(self._staged(layer, copied, waited=True))
            self._run(layer, work)
            landed = {}  # other copies may lie in their buffers by now
        if plan.in_place.any():
            experts = ids_of(plan.in_place)
            with timeline.computing("residents", layer=layer):
                self.maths.run(work, experts, self._maps.layer_slots(layer)[experts].tolist())
        if plan.admit.any():
            read = ids_of(routed & (ahead.plan.in_place | plan.in_place))
            self._admit(step, work, read, ids_of(plan.admit), landed, before)
        if plan.stream.any():
            streamed = Plan.of(len(routed), stream=plan.stream)
            self._pending.extend(self._staged(layer, streamed, waited=True))

    def _start_at_once(self, layer: int, routed: torch.Tensor) -> None:
        """Let the link have something to do while the host plans: whatever the plan, routed experts
        that are neither resident nor in staging cross it.
        """
        missing = routed & (self._maps.layer_slots(layer) < 0)
        for lot in self._issued:
            missing[lot.experts] = False
        experts = ids_of(missing)[: self._at_once]
        if experts:
            first = self.copies.stage(Pending(layer, experts, None, True), Source.FETCH)
            self._issued.extend([] if first is None else [first])

    def _keep_routed(self, layer: int, routed: torch.Tensor) -> None:
        """Count what was fetched ahead, and leave out of it what the chunk is not routed to."""
        in_time = sum(len(lot.experts) for lot in self._issued if lot.ready.passed())
        num_ahead = sum(len(lot.experts) for lot in self._issued)
        lots, self._issued = self._issued, deque()
        self._issued.extend(lot.only(routed) for lot in lots)
        num_used = sum(len(lot.experts) for lot in self._issued)
        self.counters.fetched_ahead(layer, num_ahead, in_time, num_used)

    def _admit(
        self,
        step: Step,
        work: PartialSum,
        read: list[int],
        admitted: list[int],
        landed: dict[int, int],
        after: Mark,
    ) -> None:
        """Admit experts, as many at a time as the layer has slots; of all waves but the last,
        compute them as well.

        read: routed residents. They are in the first wave, so that none is evicted before it was
        computed; with them go those that landed, of which as many as fit are kept. Each
        expert crosses the link once. after: behind the last compute that reads the freed slots.
        """
        num_slots = max(1, self.pool.share_size)
        moved = [expert for expert in admitted if expert in landed]
        fetched = [expert for expert in admitted if expert not in landed]
        moved = moved[: num_slots - len(read)]
        self.entering.landed, self.entering.fetched = moved, fetched
        needed = torch.tensor([*read, *moved, *fetched])
        waves = needed.split(num_slots)
        for number, wave in enumerate(waves, 1):
            with self.transfers.lanes.timeline.during(Track.POLICY, "admission", layer=step.layer):
                admission = self._maps.admit(wave, step)
            self.counters.count_evictions(step.layer, step.phase, admission.counts)
            placed = Placed.of(admission, step.layer, self.pool.space)
            lots = self.copies.admit(step.layer, placed, landed, self._issued, after)
            self._issued.extend(lots)
            if number < len(waves):
                self._run(step.layer, work)
                after = self.transfers.lanes.mark()

    # Both.

    def _staged(self, layer: int, plan: Plan, *, waited: bool) -> Iterator[Pending]:
        slots_E = self._maps.layer_slots(layer)
        return staged(layer, plan, slots_E, self._group_size, waited=waited)

    def _run(self, layer: int, work: PartialSum) -> None:
        """Compute the layer's lots as they are issued, issuing more as buffers come free."""
        self._pump()
        while self._issued and self._issued[0].layer == layer:
            self._compute(work, self._issued.popleft())
            self._pump()

    def _compute(self, work: PartialSum, lot: Lot) -> None:
        if lot.experts:
            lanes, experts, rows = self.transfers.lanes, lot.experts, lot.rows
            lanes.wait(lot.ready)
            with lanes.timeline.computing("lot", layer=lot.layer, experts=experts, rows=rows):
                self.maths.run(work, experts, rows)
        self.copies.done(lot)
