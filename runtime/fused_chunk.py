"""A chunk's work for the grouped kernels, and that of short chunks in graphs.

A short chunk waits for the host more than for the device: at every layer the host has to see the
routes before it can plan. So the device groups the pairs by expert and computes what it finds in
the slots by itself, in a graph captured once for a number of rows (bucket) and replayed for every
layer, while the host still waits for the routes and plans the rest. What comes later is computed
lot by lot, each by one replay of a graph for lots of about its size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from residency.runtime.experts import Call
from residency.runtime.graphs import Graphs
from residency.runtime.kernels.activations import Activation
from residency.runtime.kernels.formats import ExpertShape
from residency.runtime.kernels.grouped_gemm import launch_combine, launch_run_group
from residency.runtime.kernels.grouping import Grouping, empty_grouping, launch_group_pairs

BUCKETS = (8, 16, 32, 64, 128, 256, 512)
SMALLEST_LOT = 32  # experts that a graph of lots is for, at least


@dataclass
class ChunkWork:
    """One call, grouped by expert; results wait in sorted order until they are combined.

    x_TH, act_PI, y_PH and the grouping may have more rows than the call has tokens: those are
    routed nowhere. form: of a short chunk, what its graphs depend on; None of a longer one.
    """

    call: Call
    activation: Activation
    x_TH: Tensor
    grouping: Grouping
    act_PI: Tensor
    y_PH: Tensor
    form: Hashable | None = None

    @classmethod
    def of(
        cls, call: Call, activation: Activation, shape: ExpertShape, num_experts: int
    ) -> ChunkWork:
        grouping = launch_group_pairs(call.ids_TK.contiguous(), num_experts)
        num_pairs, x_TH = call.ids_TK.numel(), call.x_TH
        act_PI = x_TH.new_empty(num_pairs, shape.width)
        y_PH = x_TH.new_empty(num_pairs, shape.hidden)
        return cls(call, activation, x_TH, grouping, act_PI, y_PH)

    def run(self, experts_G: Tensor, row_of_E: Tensor, rows: Tensor, shape: ExpertShape) -> None:
        """Fill the results of every pair routed to the listed experts; see `run_group`."""
        launch_run_group(
            self.x_TH,
            self.grouping,
            experts_G,
            row_of_E,
            rows,
            shape,
            self.activation,
            self.act_PI,
            self.y_PH,
        )

    def combined(self) -> Tensor:
        """The call's output [T, H], when every routed expert has been run."""
        call = self.call
        grouping = self.grouping._replace(position=self.grouping.position[: len(call.x_TH)])
        return launch_combine(self.y_PH, grouping, call.weights_TK.contiguous(), call.residual_TH)


@dataclass(frozen=True)
class _Places:
    """Where a bucket's work lies, the same for every call: its graph reads and writes here."""

    x_RH: Tensor
    ids_RK: Tensor
    grouping: Grouping
    act_PI: Tensor
    y_PH: Tensor


class ShortChunks:
    """Work of up to BUCKETS[-1] tokens, one call after another, in memory that stays."""

    def __init__(self, shape: ExpertShape, rows: Tensor, num_experts: int) -> None:
        self._shape = shape
        self._rows = rows
        self._num_experts = num_experts
        self._graphs = Graphs()
        self._places: dict[int, _Places] = {}
        # The experts that are computed at once, -1 where absent, then the row of each.
        with torch.inference_mode(False):
            self._residents = torch.full((2, num_experts), -1, dtype=torch.int32).to(rows.device)
            self._lot = self._residents.clone()  # likewise, those of one lot
        self._any_residents = False

    def work(self, call: Call, activation: Activation, slots_E: Tensor | None) -> ChunkWork | None:
        """The call's work, its residents computed if slots_E tells where they lie.

        None for a chunk that is too long. A length has the same tiles, and so the same bits,
        whatever is resident.
        """
        num_tokens, top_k = call.ids_TK.shape
        if num_tokens > BUCKETS[-1]:
            return None
        bucket = next(size for size in BUCKETS if num_tokens <= size)
        places = self._places.get(bucket) or self._new_places(bucket, call)
        places.x_RH[:num_tokens].copy_(call.x_TH)
        places.ids_RK[:num_tokens].copy_(call.ids_TK)
        if num_tokens < bucket:
            places.ids_RK[num_tokens:].fill_(self._num_experts)
        self._tell(slots_E)
        form = bucket, top_k, activation
        work = ChunkWork(
            call, activation, places.x_RH, places.grouping, places.act_PI, places.y_PH, form
        )
        self._graphs.run(form, lambda: self._compute(places, work), on=self._rows.device)
        return work

    def _compute(self, places: _Places, work: ChunkWork) -> None:
        launch_group_pairs(places.ids_RK, self._num_experts, places.grouping)
        experts_E, row_of_E = self._residents
        work.run(experts_E, row_of_E, self._rows, self._shape)

    def run(self, work: ChunkWork, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Fill the results of every pair routed to `experts`, which lie in `rows`."""
        size = min(max(SMALLEST_LOT, 1 << (len(experts) - 1).bit_length()), self._num_experts)
        told = np.full((2, self._num_experts), -1, dtype=np.int32)
        told[0, : len(experts)] = experts
        told[1, told[0, : len(experts)]] = rows
        self._lot.copy_(torch.from_numpy(told), non_blocking=True)  # as `_tell` does
        experts_G, row_of_E = self._lot[0, :size], self._lot[1]

        def compute() -> None:
            work.run(experts_G, row_of_E, self._rows, self._shape)

        self._graphs.run((work.form, size), compute, on=self._rows.device)

    def _tell(self, slots_E: Tensor | None) -> None:
        """Bring the device the residents of the layer."""
        if slots_E is None and not self._any_residents:
            return
        told = np.full((2, self._num_experts), -1, dtype=np.int32)
        if slots_E is not None:
            told[1] = slots_E.numpy()
            told[0] = np.where(told[1] >= 0, np.arange(self._num_experts), -1)
        self._any_residents = bool((told[1] >= 0).any())
        # From pageable memory, which is read before the call returns.
        self._residents.copy_(torch.from_numpy(told), non_blocking=True)

    def _new_places(self, bucket: int, call: Call) -> _Places:
        num_pairs, like = bucket * call.ids_TK.shape[1], call.x_TH
        with torch.inference_mode(False):  # ordinary tensors, written in and out of it
            ids_RK = torch.full(
                (bucket, call.ids_TK.shape[1]),
                self._num_experts,
                dtype=call.ids_TK.dtype,
                device=like.device,
            )
            places = self._places[bucket] = _Places(
                torch.zeros(bucket, like.shape[1], dtype=like.dtype, device=like.device),
                ids_RK,
                empty_grouping(ids_RK, self._num_experts),
                torch.empty(num_pairs, self._shape.width, dtype=like.dtype, device=like.device),
                torch.empty(num_pairs, self._shape.hidden, dtype=like.dtype, device=like.device),
            )
        return places
