"""Measures prefill modes against one another: they take turns on one model, pool and staging.

A turn is one chunk under one mode, and all modes get the same chunk before the next is drawn. Each
begins in the same state. Cold: the slots are empty. Warm: one decode has filled them, and its slots
and the policy's memory are put back before each turn; a decode of its own before each would cost
more than what is timed and leave every mode another pool. With a prefix, the tokens before the
chunk are that decode's and are put back as well, in the cold pool too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from residency.policies.errors import CapacityError, WorkloadError
from residency.policies.prefill import PrefillMode
from residency.runtime.architecture import Architecture
from residency.runtime.bench.limits import Resident, everything_resident, link_rate
from residency.runtime.bench.measure import COLD, RandomPrompts, timed_prefill
from residency.runtime.bench.modes_report import Entry, ModesReport, Panel, Stage
from residency.runtime.bench.run import COPY_REPEATS, Judge
from residency.runtime.bench.samples import Sample, Samples
from residency.runtime.engine import Engine
from residency.runtime.environment import environment
from residency.runtime.learning import NO_CHOICE
from residency.runtime.report import Report
from residency.runtime.slot_state import SlotState


@dataclass(frozen=True)
class Contest:
    """What is run; the workload's keys, and the modes by the names that its report gives them."""

    modes: Mapping[str, PrefillMode]
    lengths: list[int]
    pools: list[str]
    prefix: list[int]
    crossing: list[str]
    decode_tokens: int
    decode_context: int
    repeats: int
    warmups: int
    seed: int

    @property
    def context(self) -> int:
        """Tokens that the longest run needs room for."""
        before = [self.prompt_tokens(prefix) for prefix in self.prefix]
        return max(max(self.prefix) + max(self.lengths), max(before) + self.decode_tokens) + 1

    def prompt_tokens(self, prefix: int) -> int:
        """Of the conversation before; with its decoded tokens it is the prefix, if there is one."""
        return prefix - self.decode_tokens if prefix else self.decode_context

    def as_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"modes": list(self.modes)}


@dataclass(frozen=True)
class Turn:
    """One chunk under one mode. choices: what the mode chose, by `choices_of`."""

    sample: Sample
    choices: list[dict[str, Any]]


Turns = dict[str, list[Turn]]  # by mode


class Course:
    """The turns of a contest behind one prefix."""

    def __init__(self, engine: Engine, contest: Contest, prefix: int) -> None:
        """Holds the conversation before the chunks, under the engine's own prefill mode."""
        self.engine = engine
        self.contest = contest
        self.prompts = RandomPrompts(engine, contest.seed)
        engine.generate(
            self.prompts.prompt(contest.prompt_tokens(prefix)),
            max_new_tokens=contest.decode_tokens + 1,  # the first is prefill's
            ignore_eos=True,
            room=prefix + max(contest.lengths) + 1 if prefix else 0,
        )
        self._slots = SlotState(engine.runtime)
        self._kept = engine.keep() if prefix else None

    def stages(self, modes: Mapping[str, PrefillMode]) -> Iterator[tuple[str, int, Turns]]:
        """Pool, length, and the timed turns, shortest first and pools side by side: what grows with
        the length, as the capacity of the sequence does, is the same in all of them.

        Kernels and graphs are warm after the first pool's warm-ups: they do not depend on the pool.
        """
        pools = self.contest.pools
        for length in sorted(self.contest.lengths):
            self._turns(modes, pools[0], length, self.contest.warmups)
            for pool in pools:
                yield pool, length, self._turns(modes, pool, length, self.contest.repeats)

    def _turns(self, modes: Mapping[str, PrefillMode], pool: str, length: int, count: int) -> Turns:
        turns: Turns = {label: [] for label in modes}
        for _ in range(count):
            chunk = self.prompts.prompt(length)
            for label, mode in modes.items():
                if pool == COLD:
                    self.engine.runtime.forget()
                else:
                    self._slots.put_back(self.engine.runtime)
                with self.engine.runtime.prefilling(mode):
                    turns[label].append(self._turn(chunk))
        return turns

    def resident(self, length: int) -> Samples:
        """Chunks whose experts are all in slots already."""
        count = self.contest.warmups + self.contest.repeats
        runs = [self._turn(self.prompts.prompt(length)).sample for _ in range(count)]
        return Samples(length, tuple(runs[self.contest.warmups :]))

    def _turn(self, chunk: list[int]) -> Turn:
        if self._kept is not None:
            self.engine.put_back(self._kept)
        report, device_s = timed_prefill(self.engine, chunk, continued=self._kept is not None)
        return Turn(Sample.prefill(report, device_s), choices_of(report))


def choices_of(report: Report) -> list[dict[str, Any]]:
    """What the prefill mode chose for the layers, if it had a choice."""
    return [chosen.as_dict() for chosen in report.choices if chosen.choice != NO_CHOICE]


def measure_modes(engine: Engine, contest: Contest, told: Callable[[str], None]) -> ModesReport:
    """`told` hears a line of each length measured."""
    link = link_rate(engine, COPY_REPEATS)
    told(f"link: {link.rate.median / 1e9:.1f} GB/s")
    modes = {label: sharing(mode, engine) for label, mode in contest.modes.items()}
    measured: dict[tuple[int, str], dict[int, Turns]] = {
        (prefix, pool): {} for prefix in contest.prefix for pool in contest.pools
    }
    for prefix in contest.prefix:
        for pool, length, turns in Course(engine, contest, prefix).stages(modes):
            measured[prefix, pool][length] = turns
            told(_line(prefix, pool, length, turns))
    notes = [*engine.notes, *engine.runtime.notes()]
    told("all resident")
    resident = _resident(engine, contest)
    judges = {prefix: Judge(engine, link, resident[prefix]) for prefix in contest.prefix}
    panels = []
    for (prefix, pool), stages in measured.items():
        judged = [_stage(engine, modes, judges[prefix], *stage) for stage in stages.items()]
        panels.append(Panel.of(pool, prefix, judged, contest.crossing))
    architecture, plan = engine.architecture, engine.runtime.plan
    return ModesReport(
        model=model_name(architecture),
        format=architecture.format.name,
        title=f"cache={engine.policies.cache.name} decode={engine.policies.decode.name}, "
        f"{plan.num_slots} slots",
        made_up=engine.made_up,
        contest=contest.as_dict(),
        panels=tuple(panels),
        link=link,
        resident=resident,
        whole_stream_s=plan.bank_bytes / link.rate.median,
        load_s=engine.load_s,
        memory=plan.as_dict(),
        environment=environment(engine.device),
        notes=notes,
    )


def model_name(architecture: Architecture) -> str:
    """A made-up model's own; of others the type, for their folders are this machine's."""
    _, made_up, name = architecture.source.partition("model=")
    space = architecture.space
    return (
        f"{name if made_up else architecture.config.model_type}, {space.num_layers} layers x "
        f"{space.num_experts} experts"
    )


def sharing(mode: PrefillMode, engine: Engine) -> PrefillMode:
    """The mode with the engine's chunks, groups and ring, since one staging serves all."""
    own = engine.policies.prefill.config
    shared = {field.name: getattr(own, field.name) for field in fields(PrefillMode.Config)}
    alike = copy.copy(mode)
    alike.config = replace(mode.config, **shared)
    return alike


def _resident(engine: Engine, contest: Contest) -> dict[int, Resident]:
    """By prefix, the times of the same chunks with a slot for every expert."""
    try:
        found = {}
        with everything_resident(engine):
            for prefix in contest.prefix:
                course = Course(engine, contest, prefix)
                samples = [course.resident(length) for length in sorted(contest.lengths)]
                found[prefix] = Resident(tuple(samples))
        return found
    except (CapacityError, WorkloadError) as error:
        reason = f"not every expert could be loaded: {error}"
        return dict.fromkeys(contest.prefix, Resident(reason=reason))


def _stage(
    engine: Engine,
    modes: Mapping[str, PrefillMode],
    judge: Judge,
    length: int,
    turns: Turns,
) -> Stage:
    """One length, every mode beside its floor."""
    entries = {}
    for label, mode in modes.items():
        samples = Samples(length, tuple(turn.sample for turn in turns[label]))
        choices = [choice for turn in turns[label] for choice in turn.choices]
        with engine.runtime.prefilling(mode):
            entries[label] = Entry(judge.point(samples), choices, fixed=not mode.learns)
    return Stage(length, entries)


def _line(prefix: int, pool: str, length: int, turns: Turns) -> str:
    behind = f" behind {prefix}" if prefix else ""
    times = ", ".join(
        f"{label.partition(' ')[0]} {min(turn.sample.seconds for turn in each) * 1e3:.1f}"
        for label, each in turns.items()
    )
    return f"{length} tokens{behind}, {pool}: TTFT ms {times}"
