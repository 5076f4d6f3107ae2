"""Two result sets beside each other: a verdict for each point of each configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from residency.reports.contests import FREE, Contest, Entrant
from residency.reports.measures import At, Measure
from residency.reports.verdicts import Verdict, change_text, verdict

SAME = ("device_name", "cpus", "threads", "host_memory")
VERSIONS = ("residency", "commit", "torch", "transformers", "python", "cuda")


@dataclass(frozen=True)
class Row:
    """One point of one configuration, now and in the base."""

    entrant: Entrant
    base: Entrant
    at: At

    @property
    def one(self) -> Measure:
        return self.entrant.measures[self.at]

    @property
    def other(self) -> Measure:
        return self.base.measures[self.at]

    @property
    def verdict(self) -> Verdict:
        return verdict(self.one, self.other)

    @property
    def change(self) -> str:
        return f"{change_text(self.one, self.other)} the base"


@dataclass(frozen=True)
class Comparison:
    """rows: of configurations that both sets have. alone: what only one has, a line each.

    differences: of machines, versions and config keys, a line each.
    """

    rows: tuple[Row, ...]
    alone: tuple[str, ...]
    differences: tuple[str, ...]

    def count(self, one: Verdict) -> int:
        return sum(row.verdict is one for row in self.rows)


def compare(contests: Sequence[Contest], base: Sequence[Contest]) -> Comparison:
    """Entrants are partners if all config keys that both have are equal, lengths and the like
    aside. Of several the one of the same folder is taken, else the first that is left.
    """
    ours = [entrant for contest in contests for entrant in contest.entrants]
    left = [entrant for contest in base for entrant in contest.entrants]
    rows, alone, pairs = [], [], []
    for entrant in ours:
        partner = _partner(entrant, left)
        if partner is None:
            alone.append(f"job {entrant.number}, {entrant.label}: no partner in the base")
            continue
        left.remove(partner)
        pairs.append((entrant, partner))
        common = [at for at in entrant.measures if at in partner.measures]
        rows += [Row(entrant, partner, at) for at in common]
        points = [at for at in (*entrant.measures, *partner.measures) if at not in common]
        alone += [
            f"job {entrant.number}, {entrant.label}: {at.text} is in one set" for at in points
        ]
    alone += [f"base job {each.number}, {each.label}: in the base alone" for each in left]
    return Comparison(tuple(rows), tuple(alone), tuple(_differences(pairs)))


def _partner(entrant: Entrant, left: Sequence[Entrant]) -> Entrant | None:
    found = [each for each in left if _equal(entrant, each)]
    same = [each for each in found if each.job.folder.name == entrant.job.folder.name]
    return next(iter([*same, *found]), None)


def _equal(one: Entrant, other: Entrant) -> bool:
    a, b = one.result, other.result
    if a.kind != b.kind or one.mode != other.mode:
        return False
    if not a.config or not b.config:
        return one.job.folder.name == other.job.folder.name
    mine, theirs = flat(a.config), flat(b.config)
    if any(mine[key] != theirs[key] for key in mine.keys() & theirs.keys()):
        return False
    targets = {key for key in mine.keys() ^ theirs.keys() if key.endswith("_target_")}
    if targets:
        return False
    return isinstance(a.config.get("model"), Mapping) or a.title == b.title


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key of a config by its dotted name, but for what work may differ in."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif name not in {f"workload.{free}" for free in FREE}:
            found[name] = value
    return found


def _differences(pairs: Sequence[tuple[Entrant, Entrant]]) -> list[str]:
    found: dict[str, None] = {}
    for one, other in pairs:
        for names, what in ((SAME, "the machine differs"), (VERSIONS, "versions differ")):
            for name in names:
                now = one.result.environment.get(name, "not told")
                then = other.result.environment.get(name, "not told")
                if now != then:
                    found[f"{what}: {name} {now}, in the base {then}"] = None
        mine, theirs = flat(one.result.config), flat(other.result.config)
        if keys := sorted(mine.keys() ^ theirs.keys()):
            found[f"config keys that one side does not have: {', '.join(keys)}"] = None
    return list(found)
