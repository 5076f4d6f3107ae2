"""Miss-ratio curves behind a report: recorded routes replayed under the jobs' cache policies."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residency.conf.build import build_part
from residency.policies.cache import CachePolicy
from residency.policies.errors import ResidencyError
from residency.policies.step import Phase
from residency.reports.contests import CHOSEN, Contest, Entrant, choices_of, label_of, plain
from residency.reports.measures import DECODE, At
from residency.reports.nodes import Node
from residency.runtime.counters import PHASES
from residency.runtime.replay.curves import Candidate, Curve, draw_curves
from residency.runtime.replay.jit import COMPILES
from residency.runtime.replay.pool import HITS, LOOKUPS
from residency.runtime.traces import Trace, read
from residency.runtime.traces.parts import part_of

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
MOST_TRACES = 4
MOST_TENSOR_VISITS = 200_000  # of all replays, where none is compiled
GROUP = CHOSEN[0]


@dataclass(frozen=True)
class Line:
    """One curve: slots and miss ratio of each point. bound: of what no policy can beat."""

    name: str
    bound: bool
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Drawn:
    """Curves of one recording. live: curve, slots and miss ratio of measured decodes."""

    title: str
    phase: str
    num_experts: int
    cycle: int
    lines: tuple[Line, ...]
    live: tuple[tuple[str, int, float], ...]
    notes: tuple[str, ...]


def drawn_of(contest: Contest) -> tuple[list[Drawn], list[str]]:
    """The curves of each recording that its jobs name, and why others are missing, a line each."""
    drawn, missing = [], []
    traces: dict[str, tuple[Path, Trace, list[Entrant]]] = {}
    for entrant in contest.entrants:
        file = entrant.job.routes
        if file is None or not file.exists():  # a job killed before it recorded has none
            continue
        try:
            trace = read(file, "")
        except ResidencyError as error:
            missing.append(f"job {entrant.number}: its routes cannot be replayed: {error}")
            continue
        traces.setdefault(_digest(trace), (file, trace, []))[2].append(entrant)
    for number, (file, trace, entrants) in enumerate(traces.values()):
        if number >= MOST_TRACES:
            missing.append(f"{file.name}: left out, since {MOST_TRACES} recordings are drawn")
            continue
        try:
            drawn.append(_drawn(file, trace, entrants))
        except ResidencyError as error:
            missing.append(f"{file.name}: it cannot be replayed: {error}")
    return drawn, missing


def _digest(trace: Trace) -> str:
    """Equal for recordings of the same routes, however prefill took them."""
    return hashlib.sha256(trace.ids_NLK.tobytes()).hexdigest()


def _drawn(file: Path, trace: Trace, entrants: Sequence[Entrant]) -> Drawn:
    candidates, names, notes = candidates_of(entrants)
    layers = trace.space.num_layers  # in shares that layers can have to themselves as well
    sizes = {round(trace.space.num_experts * share) * layers for share in SHARES}
    sizes |= {slots for each in entrants if (slots := each.result.num_slots)}
    fitting = sorted(size for size in sizes if size <= trace.space.num_ids)
    if not candidates or not fitting:
        return _bare(file, notes)
    if (part := _affordable(trace, len(candidates) * len(fitting))) < 1:
        trace = part_of(trace, 0, part)
        notes.append(f"the first {part:.1%} of the recording: without numba replays are slow")
    curves = draw_curves(trace, candidates, _possible(trace, fitting))
    phase = Phase.DECODE if trace.decode_S.any() else Phase.PREFILL
    lines = [
        Line(curve.name, curve in curves.bounds, _points(curve, phase))
        for curve in (*curves.policies, *curves.bounds)
    ]
    live = [
        (names.get(_key(each), ""), slots, 1 - rate)
        for each in entrants
        if (measure := each.measures.get(At(DECODE))) is not None
        and (rate := measure.hit_rate) is not None
        and (slots := each.result.num_slots)
    ]
    title = f"{file.name}: {trace.num_tokens:,} tokens"
    space, shown = trace.space, tuple(live if phase is Phase.DECODE else [])
    notes = [*notes, *curves.notes]
    return Drawn(title, str(phase), space.num_ids, curves.cycle, tuple(lines), shown, tuple(notes))


def _bare(file: Path, notes: list[str]) -> Drawn:
    why = (*notes, "no policy of these jobs can be replayed")
    return Drawn(file.name, str(Phase.DECODE), 0, 0, (), (), tuple(why))


def candidates_of(
    entrants: Sequence[Entrant],
) -> tuple[list[Candidate], dict[str, str], list[str]]:
    """The cache policies of the entrants, each once whatever its slots; their names by `_key`; and
    why others are not replayed.
    """
    nodes: dict[str, dict[str, Any]] = {}
    for entrant in entrants:
        node = entrant.result.config.get(GROUP)
        if isinstance(node, Mapping) and "slots" in node:
            nodes.setdefault(_key(entrant), dict(node))
    found, names, notes = [], {}, []
    results = [
        dataclasses.replace(entrants[0].result, config={GROUP: {**node, "slots": 1}})
        for node in nodes.values()
    ]
    for (key, node), choice in zip(nodes.items(), choices_of(results), strict=True):
        name = label_of(choice).replace(f"{GROUP}.", "").replace(f"{GROUP}=", "")
        try:
            policy = build_part(GROUP, {**node, "warm_start": ""} if "warm_start" in node else node)
        except ResidencyError as error:
            notes.append(f"{name}: not replayed, {error}")
            continue
        if isinstance(policy, CachePolicy):
            names[key] = name or policy.name
            found.append(Candidate(names[key], policy))
    return found, names, notes


def _key(entrant: Entrant) -> str:
    """Equal for entrants of one cache policy."""
    node = entrant.result.config.get(GROUP)
    own = node if isinstance(node, Mapping) else {}
    return plain({key: value for key, value in own.items() if key != "slots"})


def _affordable(trace: Trace, replays: int) -> float:
    """The share of a trace whose replays end in reasonable time."""
    visits = trace.num_steps * trace.space.num_layers * replays
    return 1.0 if COMPILES else min(1.0, MOST_TENSOR_VISITS / visits)


def _possible(trace: Trace, sizes: list[int]) -> list[int]:
    """Sizes that a decode step of one layer fits into."""
    least = min(trace.space.top_k * trace.batch, trace.space.num_experts)
    return [size for size in sizes if size >= least] or sizes[-1:]


def _points(curve: Curve, phase: Phase) -> tuple[tuple[int, float], ...]:
    found = []
    for point in curve.points:
        counts = point.counts[PHASES.index(phase)].sum(axis=0)
        found.append((point.slots, 1 - int(counts[HITS]) / max(1, int(counts[LOOKUPS]))))
    return tuple(found)


def saved(node: Node) -> Drawn:
    """The curves of a result of `residency replay`."""
    trace, lines = node.at("trace"), []
    for group in ("policies", "bounds"):
        for curve in node.at(group).rows():
            points = [
                (point.at("slots").count(), point.at("miss_ratio").number(0))
                for point in curve.at("points").rows()
            ]
            lines.append(Line(curve.at("name").text(), group == "bounds", tuple(points)))
    experts = trace.at("layers").count() * trace.at("experts").count()
    title = f"{trace.at('file').text()}: {trace.at('tokens').count():,} tokens"
    cycle, notes = node.at("cycle").count(), tuple(node.at("notes").texts())
    return Drawn(title, "prefill and decode", experts, cycle, tuple(lines), (), notes)
