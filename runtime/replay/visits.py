"""Visits: a trace as the pool sees it, each pass through one MoE layer a list of distinct ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from residency.policies.cache import CachePolicy
from residency.policies.step import IdSpace, Phase
from residency.runtime.counters import PHASES
from residency.runtime.traces.trace import ALL, Array, Trace

DECODE = PHASES.index(Phase.DECODE)
PREFILL = PHASES.index(Phase.PREFILL)
NEVER = 1 << 62  # later than any visit

# Ways of one id in one visit. The first two enter the slots where they miss; the last is none of
# the policy's references.
FIRST, ENTERS, PASSES, IGNORED = range(4)


@dataclass(frozen=True)
class Visits:
    """S steps x L layers, in the order in which they were made.

    ids: int32, the global ids of all visits, ascending within each. offsets: int64 [S * L + 1],
    where each visit's begin. ways: int8, of each of ids. clock_S: int64, the engine's clock.
    phase_S: int64, index in PHASES.
    """

    trace: Trace
    ids: Array
    offsets: Array
    ways: Array
    clock_S: Array
    phase_S: Array

    @property
    def space(self) -> IdSpace:
        return self.trace.space

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

    @property
    def widest_entering(self) -> int:
        """Most experts that a visit needs of which any may enter: more than slots mean waves."""
        sums = np.concatenate([[0], np.cumsum(self.ways < PASSES)])
        some = np.diff(sums[self.offsets]) > 0
        return int(np.diff(self.offsets)[some].max(initial=0))

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
        ids = np.concatenate(parts)
        visits = cls(
            trace,
            ids,
            np.concatenate([[0], np.cumsum(widths_SL.ravel())]),
            np.full(len(ids), ENTERS, dtype=np.int8),
            trace.step_clocks,
            np.where(trace.decode_S, DECODE, PREFILL).astype(np.int64),
        )
        visits.ways[~np.repeat(trace.admits_S, widths_SL.sum(axis=1))] = PASSES
        visits._mark(trace.landed_P3, FIRST)
        visits._mark(trace.passed_P3, PASSES)
        return visits

    def _mark(self, rows_P3: Array, way: int) -> None:
        """rows_P3: (step, layer, expert), ALL for each that the layer needs."""
        for step, layer, expert in rows_P3.tolist():
            part = self.part(step, layer)
            own = layer * self.space.num_experts + expert
            self.ways[part][(self.ids[part] == own) | (expert == ALL)] = way

    def part(self, step: int, layer: int) -> slice:
        """Where the ids of one visit lie."""
        visit = step * self.space.num_layers + layer
        return slice(int(self.offsets[visit]), int(self.offsets[visit + 1]))

    def under(self, policy: CachePolicy) -> Visits:
        """The same visits with the ways that `policy` leaves, by what its config says of phases and
        of a prompt's tokens.
        """
        trace = self.trace
        partly = {}  # prompts' steps of which not all tokens count, and how many do
        for step in np.flatnonzero(~trace.decode_S).tolist():
            num_tokens = int(trace.step_tokens[step])
            promoted = policy.promoted(num_tokens, int(trace.behind_S[step]))
            if promoted < num_tokens:
                partly[step] = promoted
        declined = [n for n, phase in enumerate(PHASES) if not policy.admits_in(phase)]
        if not partly and not declined:
            return self
        ways = self.ways.copy()
        widths_S = np.diff(self.offsets[:: self.space.num_layers])
        ways[np.isin(np.repeat(self.phase_S, widths_S), declined) & (ways < PASSES)] = PASSES
        changed = replace(self, ways=ways)
        if "next_visits" in vars(self):  # it is the same
            vars(changed)["next_visits"] = self.next_visits
        for step, promoted in partly.items():
            end = int(trace.step_offsets[step + 1])
            changed._promote(step, trace.ids_NLK[end - promoted : end])
        return changed

    def _promote(self, step: int, ids_TLK: Array) -> None:
        """Ignore what none of the promoted tokens is routed to."""
        for layer in range(self.space.num_layers):
            part = self.part(step, layer)
            experts = self.ids[part] - layer * self.space.num_experts
            self.ways[part][~np.isin(experts, ids_TLK[:, layer])] = IGNORED
