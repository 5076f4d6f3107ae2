"""What `residency replay` is asked: a trace, policies with their keys, and sizes.

Keys have the form of overrides, and several values with commas between them: every choice of
values is a curve.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from residency.conf.compose import compose
from residency.conf.options import option_names, option_node, suggestion
from residency.policies.cache import CachePolicy
from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace
from residency.runtime.replay.curves import Candidate
from residency.runtime.traces import Trace, read

KEYS = ("trace", "cache", "slots")
SIZES = "12.5%,25%,37.5%,50%,62.5%,75%,87.5%"
# Commas within brackets or quotes belong to a value.
COMMA = re.compile(r""",(?![^\[]*\])(?=(?:[^'"]*['"][^'"]*['"])*[^'"]*$)""")


@dataclass(frozen=True)
class Question:
    """A checked question. yaml: what was asked, defaults filled in."""

    file: str
    trace: Trace
    candidates: list[Candidate]
    sizes: list[int]
    yaml: str


def ask(words: Sequence[str]) -> Question:
    """Raises ConfigError for a key, a value or a trace that cannot be replayed."""
    asked = parsed(words, KEYS)
    file = trace_file(asked)
    caches = asked.setdefault("cache", [compose().policies.cache.name])
    slots = asked.setdefault("slots", SIZES.split(","))
    params = {key: values for key, values in asked.items() if key not in KEYS}
    candidates = [found for cache in caches for found in choices(cache, params)]
    for key in params:
        if not any(f"{key}=" in candidate.name for candidate in candidates):
            raise ConfigError(f"{key}: none of cache={','.join(caches)} has such a key")
    names = [candidate.name.replace("cache.", "") for candidate in candidates]
    candidates = [replace(c, name=name) for c, name in zip(candidates, names, strict=True)]
    if len(set(names)) < len(names):
        raise ConfigError(f"cache={','.join(caches)}: a policy is named twice")
    trace = read(file)
    sizes = sizes_of(slots, trace.space, [candidate.policy for candidate in candidates])
    yaml = "".join(f"{key}: {','.join(values)}\n" for key, values in asked.items())
    return Question(file, trace, candidates, sizes, yaml)


def parsed(words: Sequence[str], keys: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key. keys: those that are allowed beside cache.KEY."""
    asked: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise ConfigError(f"{word}: not of the form key=value; keys are {', '.join(keys)}")
        if key == "cache.slots":
            shared = word.removeprefix("cache.")
            raise ConfigError(f"{word}: all policies share it; say {shared}")
        if key == "cache.warm_start":
            raise ConfigError(f"{word}: a replay begins with empty slots, as its bounds do")
        if key not in keys and not key.startswith("cache."):
            raise ConfigError(f"{key}: there is no such key; {suggestion(key, keys)}, or cache.KEY")
        if key in asked:
            raise ConfigError(f"{word}: {key} is given twice; write {key}=A,B")
        asked[key] = [text] if key == "trace" else COMMA.split(text)
    return asked


def trace_file(asked: dict[str, list[str]]) -> str:
    (file,) = asked.get("trace") or [""]
    if not file:
        raise ConfigError("trace: a recorded trace is needed; give trace=FILE")
    return file


def choices(cache: str, params: dict[str, list[str]]) -> list[Candidate]:
    """The policy under each choice of values for those keys that it has."""
    names = option_names("cache")
    if cache not in names:
        raise ConfigError(f"cache={cache}: there is no such cache; {suggestion(cache, names)}")
    known = option_node("cache", cache)
    own = {key: values for key, values in params.items() if key.partition(".")[2] in known}
    found = []
    for choice in itertools.product(*own.values()):
        overrides = [f"{key}={value}" for key, value in zip(own, choice, strict=True)]
        config = compose([f"cache={cache}", *overrides])
        for conflict in config.faults("cache"):
            raise ConfigError(str(conflict))
        policy = config.policies.cache
        if not hasattr(policy.config, "slots"):
            raise ConfigError(f"cache={cache}: it has no slots, so there is nothing to replay")
        found.append(Candidate(" ".join([cache, *overrides]), policy))
    return found


def sizes_of(slots: list[str], space: IdSpace, policies: list[CachePolicy]) -> list[int]:
    """The numbers of slots that `slots` mean, ascending."""
    most_shares = max(policies, key=lambda policy: policy.num_shares(space))
    return sorted({_size(text, space, most_shares) for text in slots})


def _size(text: str, space: IdSpace, policy: CachePolicy) -> int:
    """The number of slots that one of `slots` means: as cache.slots does."""
    try:
        size = type(policy)(replace(policy.config, slots=text)).num_slots(space)
    except ValueError as error:
        raise ConfigError(f"slots={text}: {error}") from error
    if size > space.num_ids:
        raise ConfigError(f"slots={text}: the trace's model has {space.num_ids} experts in all")
    return size
