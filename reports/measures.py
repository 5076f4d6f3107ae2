"""Measures: the times in a result, each with its spread, its counts and its place in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from residency.policies.step import Phase
from residency.reports.nodes import Node
from residency.runtime.counters import LINK_SOURCES
from residency.runtime.report import BATCH

BENCH, MODES = "bench", "prefill_modes"
RUN = ""  # the kind of a result that names none
KINDS = (RUN, BATCH, BENCH, MODES)
TTFT, DECODE = "TTFT", "decode"
COLD = "cold"


@dataclass(frozen=True, order=True)
class At:
    """What was timed. tokens: of the prompt's chunk, 0 for decode. prefix: tokens before it."""

    quantity: str
    pool: str = ""
    prefix: int = 0
    tokens: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """What chunks have in common that are drawn on one pair of axes."""
        return self.pool, self.prefix

    @property
    def text(self) -> str:
        if self.quantity == DECODE:
            return DECODE
        return f"{TTFT} at {self.tokens:,} tokens{place_text(self.place, ', ')}"


def place_text(place: tuple[str, int], before: str = "") -> str:
    """In words; the cold pool without a prefix goes without saying."""
    pool, prefix = place
    words = [f"{pool} pool"] if pool not in ("", COLD) else []
    words += [f"{prefix:,} tokens before"] if prefix else []
    return before + ", ".join(words) if words else ""


@dataclass(frozen=True)
class Field:
    """One number as it stands in result.json, and where."""

    name: str
    unit: str
    node: Node


@dataclass(frozen=True)
class Measure:
    """One time of one configuration, in seconds; a token's for decode.

    fields: the numbers behind it. num_runs: timed runs behind the spread.
    bytes: moved by a prompt, or by a step of decode, by source; None where it is not told.
    counters: rows of the result, of this phase. step_lookups: experts of a step, all layers.
    """

    at: At
    fields: tuple[Field, ...]
    median: float
    least: float
    most: float
    num_runs: int
    floor_s: float | None = None
    hit_rate: float | None = None
    bytes: dict[str, float] | None = None
    counters: tuple[dict[str, Any], ...] = ()
    step_lookups: float | None = None

    @property
    def pointer(self) -> str:
        """Of the median."""
        return self.fields[0].node.pointer

    @property
    def link_bytes(self) -> float | None:
        if self.bytes is None:
            return None
        return sum(self.bytes.get(source, 0.0) for source in LINK_SOURCES)


@dataclass(frozen=True)
class Crossing:
    """Where two modes took the same time, as the result says. tokens: None where they did not."""

    place: tuple[str, int]
    modes: tuple[str, ...]
    tokens: float | None
    pointer: str


def measures_of(result: Node, kind: str) -> dict[str, list[Measure]]:
    """All times, by prefill mode where the result has several, under "" where it has not.

    Raises ConfigError for a result that lacks what its kind has.
    """
    if kind == MODES:
        return _modes(result)
    if kind == BENCH:
        pool = str(result.at("plan").mapping().get("pool", ""))
        chunks = [_chunk(entry, pool, 0) for entry in result.at("prefill").rows()]
        return {"": [*chunks, _decode(result.at("decode"))]}
    return {"": list(_one_run(result, kind))}


def crossings_of(result: Node, kind: str) -> list[Crossing]:
    """Those that the result itself names."""
    found = []
    for panel in result.at("panels").rows() if kind == MODES else []:
        met = panel.at("crossing")
        tokens, modes = met.get("tokens"), tuple(met.at("modes").texts())
        if modes:
            at = None if tokens is None else tokens.number(0)
            found.append(Crossing(_place(panel), modes, at, met.pointer))
    return found


def _place(panel: Node) -> tuple[str, int]:
    return panel.at("pool").text(), panel.at("prefix").count()


def _modes(result: Node) -> dict[str, list[Measure]]:
    found: dict[str, list[Measure]] = {}
    for panel in result.at("panels").rows():
        for point in panel.at("points").rows():
            for name, entry in point.at("modes").items():
                found.setdefault(name, []).append(_chunk(entry, *_place(panel)))
    return found


def _chunk(entry: Node, pool: str, prefix: int) -> Measure:
    at = At(TTFT, pool, prefix, entry.at("tokens").count())
    return _timed(entry, at, "ttft_s", per=1)


def _decode(entry: Node) -> Measure:
    return _timed(entry, At(DECODE), "tpot_s", per=max(1, entry.at("tokens").count()))


def _timed(entry: Node, at: At, key: str, per: int) -> Measure:
    """per: steps of a run, among which what it moved is shared out."""
    spread, runs = entry.at(key), entry.at("runs").rows()
    floor, rate, moved = entry.get("floor"), entry.get("hit_rate"), entry.get("bytes")
    fields = [Field(name, "s", spread.at(name)) for name in ("median", "least", "most")]
    median, least, most = (field.node.seconds() for field in fields)
    if floor is not None:
        fields.append(Field("floor", "s", floor.at("own_s")))
    if not least <= median <= most or not runs:
        spread.refuse("a spread of the timed runs")
    totals = [totals for run in runs if (totals := run.get("totals")) is not None]
    lookups = [each.at("lookups").count() / per for each in totals]
    return Measure(
        at,
        (*fields, *_counted(rate, moved)),
        median,
        least,
        most,
        len(runs),
        floor_s=None if floor is None else floor.at("own_s").seconds(),
        hit_rate=None if rate is None else rate.number(0),
        bytes=None if moved is None else _bytes(moved, per),
        counters=_counters(entry, None),
        step_lookups=sum(lookups) / len(lookups) if lookups else None,
    )


def _one_run(result: Node, kind: str) -> Iterator[Measure]:
    """Of a run of one prompt, or of the first of several prompts and the decode of all."""
    phases = {row.at("phase").text(): row for row in result.at("phases").rows()}
    first = result
    if kind == BATCH:
        first, *_ = result.at("sequences").rows() or [result]
    ttft, at = first.at("ttft_s"), At(TTFT, COLD, 0, first.at("prompt_tokens").count())
    prefill = phases.get(str(Phase.PREFILL)) if kind == RUN else None
    yield _single(ttft, at, prefill, result, Phase.PREFILL, 1)
    if (tpot := result.get("tpot_s")) is not None:
        steps = max(1, len(result.at("step_s").rows()))
        decode = phases.get(str(Phase.DECODE))
        yield _single(tpot, At(DECODE), decode, result, Phase.DECODE, steps)


def _single(
    time: Node, at: At, phase_row: Node | None, result: Node, phase: Phase, per: int
) -> Measure:
    seconds = time.seconds()
    rate = None if phase_row is None else phase_row.get("hit_rate")
    moved = None if phase_row is None else phase_row.at("bytes")
    return Measure(
        at,
        (Field("median", "s", time), *_counted(rate, moved)),
        seconds,
        seconds,
        seconds,
        1,
        hit_rate=None if rate is None else rate.number(0),
        bytes=None if moved is None else _bytes(moved, per),
        counters=_counters(result, phase),
        step_lookups=None if phase_row is None else phase_row.at("lookups").count() / per,
    )


def _counted(rate: Node | None, moved: Node | None) -> list[Field]:
    """Of a whole run."""
    found = [] if rate is None else [Field("hit rate", "1", rate)]
    sources = [] if moved is None else moved.items()
    return [*found, *(Field(f"bytes, {source}", "B", node) for source, node in sources)]


def _bytes(moved: Node, per: int) -> dict[str, float]:
    return {source: node.number(0) / per for source, node in moved.items()}


def _counters(entry: Node, phase: Phase | None) -> tuple[dict[str, Any], ...]:
    rows = entry.get("counters")
    found = []
    for row in [] if rows is None else rows.rows():
        own = {name: row.at(name).count() for name in ("layer", "lookups", "hits")}
        if phase is None or row.at("phase").text() == phase:
            found.append(own)
    return tuple(found)
