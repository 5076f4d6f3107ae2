"""What `residency tune` is asked: a policy, values to try for its keys, two parts of a trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from residency.conf.compose import compose
from residency.conf.options import option_node
from residency.conf.replaying import choices, parsed, sizes_of, trace_file
from residency.policies.cache import CachePolicy
from residency.policies.errors import ConfigError
from residency.runtime.replay.curves import Candidate
from residency.runtime.replay.tuning import Choice
from residency.runtime.traces import Trace, read
from residency.runtime.traces.parts import part_of

KEYS = ("trace", "cache", "slots", "fit", "report")
SIZES = "25%,50%"
HALVES = {"first-half": (0.0, 0.5), "second-half": (0.5, 1.0)}
SHARES = re.compile(r"(\d+(?:\.\d+)?)%-(\d+(?:\.\d+)?)%")


@dataclass(frozen=True)
class Tuning:
    """A checked question. values: those to try, by key. start: the config's own of each key.

    others: what the tuned policy is shown beside. yaml: what was asked, defaults filled in.
    """

    file: str
    cache: str
    fit: Trace
    report: Trace
    start: Choice
    values: dict[str, list[str]]
    sizes: list[int]
    others: list[Candidate]
    asked: dict[str, list[str]]

    @property
    def yaml(self) -> str:
        return "".join(f"{key}: {','.join(values)}\n" for key, values in self.asked.items())

    def make(self, choice: Choice) -> CachePolicy:
        """Raises ConfigError for values that the policy refuses."""
        (found,) = choices(self.cache, {key: [value] for key, value in choice.items()})
        return found.policy

    def overrides(self, choice: Choice) -> str:
        return " ".join([f"cache={self.cache}", *(f"{k}={v}" for k, v in choice.items())])


def ask(words: Sequence[str]) -> Tuning:
    """Raises ConfigError for a key, a value, a part or a trace that cannot be had."""
    asked = parsed(words, KEYS)
    file = trace_file(asked)
    for key in ("cache", "fit", "report"):
        if len(asked.get(key, [""])) > 1:
            raise ConfigError(f"{key}={','.join(asked[key])}: it takes one value")
    if "cache" not in asked:
        raise ConfigError("cache: a policy to tune is needed; give cache=NAME")
    (cache,) = asked["cache"]
    values = {key: each for key, each in asked.items() if key not in KEYS}
    if not values:
        raise ConfigError(f"cache={cache}: no values to try; give cache.KEY=A,B,C")
    (own,) = choices(cache, {})
    known = option_node("cache", cache)
    for key in values:
        if key.partition(".")[2] not in known:
            raise ConfigError(f"{key}: cache={cache} has no such key")
    for key, each in values.items():
        choices(cache, {key: each})  # refuses a value before any is replayed
    start = {key: str(known[key.partition(".")[2]]) for key in values}
    parts = [asked.setdefault(key, [half])[0] for key, half in zip(KEYS[3:], HALVES, strict=True)]
    shares = [_shares(key, text) for key, text in zip(KEYS[3:], parts, strict=True)]
    if max(shares[0][0], shares[1][0]) < min(shares[0][1], shares[1][1]):
        raise ConfigError(
            f"fit={parts[0]} report={parts[1]}: they share tokens, and what was fitted to a part "
            "says nothing there; mend it with fit=first-half report=second-half"
        )
    trace = read(file)
    fit, report = (part_of(trace, *share) for share in shares)
    sizes = sizes_of(asked.setdefault("slots", SIZES.split(",")), trace.space, [own.policy])
    beside = ("lru", compose().policies.cache.name)
    others = [Candidate(name, choices(name, {})[0].policy) for name in beside if name != cache]
    return Tuning(file, cache, fit, report, start, values, sizes, others, asked)


def _shares(key: str, text: str) -> tuple[float, float]:
    if text in HALVES:
        return HALVES[text]
    if found := SHARES.fullmatch(text):
        begin, end = (float(share) / 100 for share in found.groups())
        if begin < end <= 1:
            return begin, end
    raise ConfigError(f"{key}={text}: it is {', '.join(HALVES)}, or shares of the tokens as 0%-80%")
