"""Advice: what fits, what it is expected to take, and why it was chosen; for a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from residency.policies.decode import DecodeTarget
from residency.policies.prefill import PrefillMode
from residency.policies.prefill.always_stream import AlwaysStream
from residency.runtime.architecture import Architecture
from residency.runtime.forecast.budget import CONTEXT_BYTES, HOST_RESERVED_BYTES, Budget
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.decode import Step, Unknown, decode_step
from residency.runtime.forecast.prefill import PrefillForecast, Prompt, Shape
from residency.runtime.forecast.routes import Routes
from residency.runtime.memory import MemoryPlan

LENGTHS = (16, 64, 256, 512, 1024, 4096, 8192)
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class PromptTimes:
    """A prompt of so many tokens under one mode: slots empty, and as decode leaves them."""

    mode: str
    cold: Prompt
    warm: Prompt


@dataclass(frozen=True)
class DecodeTimes:
    """Decode steps of one target, by hit rate. why_not: why there are none."""

    target: str
    steps: tuple[Step, ...]
    estimated: Step | None
    why_not: str = ""


@dataclass(frozen=True)
class Advice:
    """choices: for each key that was chosen, its override and the reason.
    measured_tokens: the longest chunk whose compute was measured, where that is `exact`.
    unknown: why no times are told; empty where they are.
    """

    model: str
    budget: Budget
    memory: MemoryPlan
    context: int
    cycle: int
    routes: str
    hit_rate: float
    choices: tuple[tuple[str, str], ...]
    prompts: tuple[PromptTimes, ...] = ()
    decodes: tuple[DecodeTimes, ...] = ()
    sources: tuple[str, ...] = ()
    exact: bool = False
    measured_tokens: int = 0
    unknown: str = ""
    warnings: tuple[str, ...] = field(default=())

    @property
    def share(self) -> float:
        """Of the experts, those with a slot."""
        return self.memory.num_slots / max(self.memory.bank_bytes // self.memory.row_bytes, 1)

    @property
    def reserved_bytes(self) -> int:
        """Of what the slots have to share: CUDA's context and its libraries, or the host's part."""
        if self.budget.device_bytes is None:
            return HOST_RESERVED_BYTES
        return CONTEXT_BYTES + self.memory.reserve_bytes

    def as_dict(self) -> dict[str, Any]:
        own = asdict(self)
        own["memory"] = self.memory.as_dict() | {
            "pool_bytes": self.memory.pool_bytes,
            "staging_bytes": self.memory.staging_bytes,
            "reserved_bytes": self.reserved_bytes,
        }
        own["choices"] = [{"override": o, "reason": reason} for o, reason in self.choices]
        return {"kind": "plan", "version": 1, **own, "share": self.share}


def shape_of(architecture: Architecture, memory: MemoryPlan) -> Shape:
    return Shape(
        architecture.space, architecture.layout.row_bytes, memory.num_slots, memory.group_size
    )


def prompt_times(
    mode: PrefillMode,
    routes: Routes,
    shape: Shape,
    constants: Constants,
    context: int,
    *,
    welcome: bool = True,
) -> tuple[PromptTimes, ...]:
    """The mode, and streams of whole layers beside it, at usual lengths that fit the context."""
    lengths = [n for n in LENGTHS if n < context] or [context]
    resident = routes.resident(shape.num_slots)
    found = []
    cuts = {key: getattr(mode.config, key) for key in ("chunk_tokens", "groups", "ring")}
    stream = AlwaysStream(AlwaysStream.Config(**cuts))
    for own in {one.name: one for one in (stream, mode)}.values():
        forecast = PrefillForecast(own, routes, shape, constants, welcome=welcome)
        for n in lengths:
            found.append(PromptTimes(own.name, forecast.prompt(n), forecast.prompt(n, resident)))
    found.sort(key=lambda one: one.mode != mode.name)
    return tuple(found)


def decode_times(
    target: DecodeTarget,
    routes: Routes,
    shape: Shape,
    constants: Constants,
    hit_rate: float,
    batch: int = 1,
) -> DecodeTimes:
    """By hit rate, and at the one that is estimated. Where every expert is computed on the host,
    none is a hit."""
    layers = shape.space.num_layers
    lookups = None
    if batch > 1:
        lookups = max(1, round(float(routes.chances(batch).sum()) / layers))
    slots = len(target.host_layers(layers)) < layers
    rates = HIT_RATES if slots else (0.0,)
    try:
        steps = tuple(
            decode_step(target, shape.space, shape.row_bytes, constants, rate, lookups)
            for rate in rates
        )
        own = hit_rate if slots else 0.0
        at = decode_step(target, shape.space, shape.row_bytes, constants, own, lookups)
    except Unknown as why:
        return DecodeTimes(target.name, (), None, str(why))
    return DecodeTimes(target.name, steps, at)


def warnings_of(memory: MemoryPlan, cycle: int, needs_slots: bool) -> tuple[str, ...]:
    if needs_slots and memory.num_slots < cycle:
        return (
            f"{memory.num_slots:,} slots are less than one token's {cycle:,} experts: a global LRU "
            "would hit nothing, and other policies little",
        )
    return ()
