"""Visits: a trace as the pool sees it, each pass through one MoE layer a list of distinct ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from residency.policies.step import IdSpace, Phase
from residency.runtime.counters import PHASES
from residency.runtime.traces.trace import Array, Trace

DECODE = PHASES.index(Phase.DECODE)
PREFILL = PHASES.index(Phase.PREFILL)
NEVER = 1 << 62  # later than any visit


@dataclass(frozen=True)
class Visits:
    """S steps x L layers, in the order in which they were made.

    ids: int32, the global ids of all visits, ascending within each. offsets: int64 [S * L + 1],
    where each visit's begin. clock_S: int64, the engine's clock. phase_S: int64, index in PHASES.
    admits_S: bool, whether missing experts enter the slots.
    """

    space: IdSpace
    ids: Array
    offsets: Array
    clock_S: Array
    phase_S: Array
    admits_S: Array

    @property
    def num_steps(self) -> int:
        return len(self.clock_S)

    @property
    def lookups(self) -> int:
        """Distinct experts of each visit, summed: what the live counters call lookups."""
        return len(self.ids)

    @property
    def widest_decode(self) -> int:
        """Most experts that one layer of a decode step needs; 0 without one."""
        widths = np.diff(self.offsets).reshape(self.num_steps, -1)
        return int(widths[self.phase_S == DECODE].max(initial=0))

    @cached_property
    def next_visits(self) -> Array:
        """int64, as long as ids: the next visit that wants the same id, or NEVER."""
        visit_of = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        order = np.argsort(self.ids, kind="stable")
        following = np.full(len(order), NEVER, dtype=np.int64)
        same = self.ids[order[1:]] == self.ids[order[:-1]]
        following[order[:-1][same]] = visit_of[order[1:][same]]
        return following

    @classmethod
    def of(cls, trace: Trace) -> Visits:
        space = trace.space
        tokens_S = trace.step_tokens
        layers_L = np.arange(space.num_layers, dtype=np.int32) * space.num_experts
        ids_NLK = np.sort(trace.ids_NLK, axis=2).astype(np.int32) + layers_L[:, None]
        # A step of one token visits its k experts as they are; longer ones are made distinct.
        widths_SL = np.full((trace.num_steps, space.num_layers), space.top_k, dtype=np.int64)
        parts: list[Array] = []
        start = 0
        for step in np.flatnonzero(tokens_S > 1):
            first, end = trace.step_offsets[step : step + 2]
            parts.append(ids_NLK[start:first].ravel())
            for layer in range(space.num_layers):
                parts.append(np.unique(ids_NLK[first:end, layer]))
                widths_SL[step, layer] = len(parts[-1])
            start = end
        parts.append(ids_NLK[start:].ravel())
        return cls(
            space,
            np.concatenate(parts),
            np.concatenate([[0], np.cumsum(widths_SL.ravel())]),
            trace.step_clocks,
            np.where(trace.decode_S, DECODE, PREFILL).astype(np.int64),
            trace.admits_S,
        )
