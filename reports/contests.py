"""Contests: configurations that may be compared, since model, machine and work are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from residency.reports.measures import DECODE, TTFT, At, Crossing, Measure
from residency.reports.reading import Job, ResultSet
from residency.reports.results import Result, option

CHOSEN = ("cache", "prefill", "decode", "device")  # groups in which configurations differ
MACHINE = ("device", "device_name", "cpus")
FREE = ("lengths", "repeats", "warmups", "modes", "crossing")  # what work may differ in
FOLDER = "folder"  # the key of a choice by which results of one configuration are told apart
MOST_LINES = 8  # of one pair of axes
SLOTS = "cache.slots"


@dataclass(frozen=True)
class Entrant:
    """One configuration. choice: what tells it from the others of its contest, by key."""

    job: Job
    result: Result
    mode: str
    choice: Mapping[str, str]
    measures: Mapping[At, Measure]

    @property
    def label(self) -> str:
        return label_of(self.choice) or self.mode or self.result.title

    @property
    def number(self) -> str:
        return self.job.number

    @property
    def short(self) -> str:
        """By which a reader finds it: its job, and its mode where the job has several."""
        return f"{self.number} ({self.mode})" if self.mode else self.number


@dataclass(frozen=True)
class Contest:
    """Entrants in the order of their jobs. setting: what all of them share, by key."""

    entrants: tuple[Entrant, ...]
    setting: Mapping[str, str]
    crossings: tuple[Crossing, ...]

    @property
    def result(self) -> Result:
        """The first: of what all share it says the same as the others."""
        return self.entrants[0].result

    @property
    def results(self) -> list[Result]:
        return list({each.result.file: each.result for each in self.entrants}.values())

    @property
    def points(self) -> list[At]:
        """Everything that any entrant was timed at; decode first."""
        found = {at for entrant in self.entrants for at in entrant.measures}
        return sorted(found, key=lambda at: (at.quantity != DECODE, at))

    @property
    def places(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys(at.place for at in self.points if at.quantity == TTFT))

    @property
    def varied(self) -> dict[str, list[str]]:
        """The values of each key in which entrants differ."""
        found: dict[str, dict[str, None]] = {}
        for entrant in self.entrants:
            for key, value in entrant.choice.items():
                found.setdefault(key, {})[value] = None
        return {key: list(values) for key, values in found.items()}

    @property
    def title(self) -> str:
        result = self.result
        said = f"{result.model}, {result.environment.get('device_name', 'unknown device')}"
        return f"{said}, routing {result.routing}" if result.routing else said


def titles_of(contests: Sequence[Contest]) -> list[str]:
    """Of each contest, with what of its setting tells it from others of the same title."""
    found = []
    for contest in contests:
        alike = [each for each in contests if each.title == contest.title]
        others = [each for each in alike if each is not contest]
        names = []
        for key, value in contest.setting.items():
            told = [each for each in others if each.setting.get(key) != value]
            if told and key.rpartition(".")[2] not in FREE:
                names.append(f"{key}={value}")
                others = [each for each in others if each not in told]
        names += [contest.result.title] if others else []
        found.append(", ".join([contest.title, *names]))
    return found


def label_of(choice: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in choice.items())


def contests_of(found: ResultSet) -> list[Contest]:
    """In the order in which their first results were given."""
    groups: dict[str, list[tuple[Job, Result]]] = {}
    for job, result in found.done:
        groups.setdefault(_setting_key(result), []).append((job, result))
    return [_contest(members) for members in groups.values()]


def _setting_key(result: Result) -> str:
    """Equal for results that may be compared."""
    config, environment = result.config, result.environment
    work = _mapping(config.get("workload"))
    work = {key: value for key, value in work.items() if key not in FREE}
    own = None if config else str(result.file)  # without a config nothing is known to be equal
    if config and not isinstance(config.get("model"), Mapping):  # another program's
        work = {key: value for key, value in result.plan.items() if key not in FREE}
    machine = [environment.get(key) for key in MACHINE]
    return json.dumps([result.kind, config.get("model"), work, machine, own], sort_keys=True)


def _contest(members: Sequence[tuple[Job, Result]]) -> Contest:
    choices = choices_of([result for _, result in members])
    entrants = []
    for (job, result), choice in zip(members, choices, strict=True):
        for mode, measures in result.measures.items():
            own = choice | ({"prefill": mode} if mode else {})
            by_at = {measure.at: measure for measure in measures}
            entrants.append(Entrant(job, result, mode, own, by_at))
    crossings = tuple(each for _, result in members for each in result.crossings)
    return Contest(tuple(_distinct(entrants)), setting_of(members[0][1]), crossings)


def _distinct(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Those that their choices do not tell apart are told apart by their folders."""
    labels = [entrant.label for entrant in entrants]
    if len(set(labels)) == len(labels):
        return list(entrants)
    return [
        replace(each, choice={**each.choice, FOLDER: each.job.folder.name})
        if labels.count(each.label) > 1
        else each
        for each in entrants
    ]


def choices_of(results: Sequence[Result]) -> list[dict[str, str]]:
    """Of each result, the options and keys in which the results differ."""
    found: list[dict[str, str]] = [{} for _ in results]
    for group in CHOSEN:
        nodes = [_mapping(result.config.get(group)) for result in results]
        options = [option(node) if node else "" for node in nodes]
        if len(set(options)) > 1:
            for choice, name in zip(found, options, strict=True):
                choice |= {group: name} if name else {}
        for key in dict.fromkeys(key for node in nodes for key in node if key != "_target_"):
            values = [
                (name, node[key]) for name, node in zip(options, nodes, strict=True) if key in node
            ]
            if _differs(values, across=f"{group}.{key}" == SLOTS):
                for choice, node in zip(found, nodes, strict=True):
                    choice |= {f"{group}.{key}": plain(node[key])} if key in node else {}
    return found


def _differs(values: Sequence[tuple[str, Any]], across: bool) -> bool:
    """Whether a key has several values: under one option, or across options as well."""
    seen: dict[str, set[str]] = {}
    for name, value in values:
        seen.setdefault("" if across else name, set()).add(plain(value))
    return any(len(each) > 1 for each in seen.values())


def setting_of(result: Result) -> dict[str, str]:
    """Model and work, by key, as overrides name them."""
    found: dict[str, str] = {}
    for group in ("model", "workload"):
        node = result.config.get(group)
        if isinstance(node, Mapping):
            found[group] = option(node)
            found |= {f"{group}.{k}": plain(v) for k, v in node.items() if k != "_target_"}
        elif node is not None:
            found[group] = plain(node)
    found |= {key: result.environment[key] for key in MACHINE if key in result.environment}
    if not isinstance(result.config.get("model"), Mapping):
        found |= {key: plain(value) for key, value in result.plan.items()}
    return found


def facets(entrants: Sequence[Entrant], most: int = MOST_LINES) -> list[tuple[str, list[Entrant]]]:
    """Entrants in as few groups of at most `most` as a key of their choices gives, else in order.

    Each group has a title, empty where there is one.
    """
    if len(entrants) <= most:
        return [("", list(entrants))]
    keys = dict.fromkeys(key for entrant in entrants for key in entrant.choice)
    fitting = []
    for key in keys:
        groups: dict[str, list[Entrant]] = {}
        for entrant in entrants:
            groups.setdefault(entrant.choice.get(key, ""), []).append(entrant)
        if max(map(len, groups.values())) <= most:
            fitting.append([(f"{key}={value}", group) for value, group in groups.items()])
    if fitting:
        return min(fitting, key=len)
    parts = [entrants[i : i + most] for i in range(0, len(entrants), most)]
    return [(f"part {n} of {len(parts)}", list(part)) for n, part in enumerate(parts, 1)]


def without(choice: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    gone = set(keys)
    return {key: value for key, value in choice.items() if key not in gone}


def plain(value: Any) -> str:
    """A config's value as an override would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mapping(node: Any) -> Mapping[str, Any]:
    return node if isinstance(node, Mapping) else {}
