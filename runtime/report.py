"""The report of one run: what was generated, how long it took, and what moved.

`result.json` holds `Report.as_dict()`; docs/result-format.md describes every key. VERSION rises
whenever a key changes its meaning or goes away.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residency.policies.step import Phase
from residency.runtime.counters import FIELDS, LINK_SOURCES, LayerCounts
from residency.runtime.environment import environment
from residency.runtime.generation import Continuation, Generation
from residency.runtime.learning import Chosen

if TYPE_CHECKING:
    from residency.runtime.offload import OffloadRuntime

VERSION = 1
_MEASURED = ("step_s", "phases", "counters", "choices")
BATCH = "batch"  # the kind of a report of several sequences


@dataclass(frozen=True)
class PhaseTotals:
    """One phase summed over layers.

    link_share: part of the phase in which the link was copying; None where that cannot be told,
    because the copies are part of a captured graph.
    """

    phase: str
    seconds: float
    link_seconds: float | None
    lookups: int
    hits: int
    misses: int
    evictions: int
    computed: int
    fetched: int
    ahead: int
    ahead_in_time: int
    ahead_used: int
    bytes: dict[str, int]

    @classmethod
    def of(
        cls, phase: Phase, rows: Iterable[LayerCounts], seconds: float, link_seconds: float | None
    ) -> PhaseTotals:
        own = [row for row in rows if row.phase == phase]
        fields = [*FIELDS, "fetched", "ahead", "ahead_in_time", "ahead_used"]
        sums = {field: sum(getattr(row, field) for row in own) for field in fields}
        sources = own[0].bytes if own else {}
        moved = {source: sum(row.bytes[source] for row in own) for source in sources}
        return cls(str(phase), seconds, link_seconds, **sums, bytes=moved)

    @property
    def link_share(self) -> float | None:
        if self.link_seconds is None:
            return None
        return self.link_seconds / self.seconds if self.seconds else 0.0

    @property
    def link_bytes(self) -> int:
        return sum(self.bytes.get(source, 0) for source in LINK_SOURCES)

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.lookups if self.lookups else None

    def as_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"link_share": self.link_share, "hit_rate": self.hit_rate}


@dataclass(frozen=True)
class SequenceReport:
    """What became of one sequence. ttft_s: seconds of prefill, earlier prompts' included."""

    text: str
    finish: str  # "stop" at a stop token, "length" at its limit
    prompt_tokens: int
    token_ids: list[int]
    ttft_s: float

    @classmethod
    def of(cls, text: str, prompt: list[int], continuation: Continuation) -> SequenceReport:
        return cls(
            text=text,
            finish="stop" if continuation.stopped else "length",
            prompt_tokens=len(prompt),
            token_ids=continuation.token_ids,
            ttft_s=continuation.ttft_s,
        )

    def as_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"new_tokens": len(self.token_ids)}


@dataclass(frozen=True)
class BatchReport:
    """What several sequences cost that were decoded together, a token of each live one a step."""

    sequences: list[SequenceReport]
    step_s: list[float]  # wall-clock of each decode step
    phases: list[PhaseTotals]
    counters: list[LayerCounts]
    choices: list[Chosen]
    memory: dict[str, int]
    environment: dict[str, str]
    notes: list[str]

    @classmethod
    def of(
        cls,
        runtime: OffloadRuntime,
        generation: Generation,
        texts: list[str],
        prompts: list[list[int]],
        notes: list[str],
    ) -> BatchReport:
        """Of the generation that has just ended on `runtime`."""
        rows = runtime.counters.rows()
        untimed = runtime.decode_is_fused  # its kernels copy, not the copy lane
        decode_copy_s = None if untimed else generation.decode_copy_s
        each = zip(texts, prompts, generation.continuations, strict=True)
        return cls(
            sequences=[SequenceReport.of(*one) for one in each],
            step_s=generation.step_s,
            phases=[
                PhaseTotals.of(
                    Phase.PREFILL, rows, generation.prefill_s, generation.prefill_copy_s
                ),
                PhaseTotals.of(Phase.DECODE, rows, sum(generation.step_s), decode_copy_s),
            ],
            counters=rows,
            choices=runtime.choices(),
            memory=runtime.plan.as_dict(),
            environment=environment(runtime.lanes.device),
            notes=notes,
        )

    @property
    def tpot_s(self) -> float | None:
        """Median time per output token of a sequence after its first."""
        return statistics.median(self.step_s) if self.step_s else None

    @property
    def decoded_tokens(self) -> int:
        """New tokens of all sequences that came from decode steps, stop tokens excepted."""
        return sum(max(0, len(one.token_ids) - 1) for one in self.sequences)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens of all sequences over the time of all steps."""
        return self.decoded_tokens / sum(self.step_s) if self.step_s else None

    def alone(self) -> Report:
        """The report of a batch of one."""
        (one,) = self.sequences
        shared = {
            name: getattr(self, name) for name in (*_MEASURED, "memory", "environment", "notes")
        }
        return Report(**{name: getattr(one, name) for name in one.__dataclass_fields__}, **shared)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "kind": BATCH,
            "sequences": [one.as_dict() for one in self.sequences],
            "tpot_s": self.tpot_s,
            "tokens_per_s": self.tokens_per_s,
            "step_s": self.step_s,
            "phases": [phase.as_dict() for phase in self.phases],
            "counters": [row.as_dict() for row in self.counters],
            "choices": [chosen.as_dict() for chosen in self.choices],
            "memory": self.memory,
            "environment": self.environment,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Report:
    """What one generation cost. ttft_s and tpot_s are wall-clock; tpot_s is None below 2 tokens."""

    text: str
    finish: str  # "stop" at a stop token, "length" at max_new_tokens
    prompt_tokens: int
    token_ids: list[int]
    ttft_s: float
    step_s: list[float]  # wall-clock of each decode step
    phases: list[PhaseTotals]
    counters: list[LayerCounts]
    choices: list[Chosen]
    memory: dict[str, int]
    environment: dict[str, str]
    notes: list[str]

    @property
    def tpot_s(self) -> float | None:
        """Median time per output token after the first."""
        return statistics.median(self.step_s) if self.step_s else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "text": self.text,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "step_s": self.step_s,
            "phases": [phase.as_dict() for phase in self.phases],
            "counters": [row.as_dict() for row in self.counters],
            "choices": [chosen.as_dict() for chosen in self.choices],
            "memory": self.memory,
            "environment": self.environment,
            "notes": self.notes,
        }
