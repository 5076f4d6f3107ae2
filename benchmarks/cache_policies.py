"""Cache policies on the half of a trace that none was fitted to, and what each source is worth.

python benchmarks/cache_policies.py TRACE... [--out DIR]

Of each trace the keys of lrfu and succession are searched on the first half, as `residency tune`
does; all policies are then replayed on the second. succession is also replayed without each of its
sources of evidence, its other keys as they are by default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from residency.conf.replaying import choices
from residency.policies.cache import CachePolicy
from residency.runtime.environment import environment
from residency.runtime.replay.belady import belady
from residency.runtime.replay.pool import HITS, LOOKUPS
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.tuning import Choice, search
from residency.runtime.replay.visits import Visits
from residency.runtime.results import ResultFolder
from residency.runtime.traces import read
from residency.runtime.traces.parts import part_of
from residency.runtime.traces.trace import Array, Trace

SHARES = (0.25, 0.5)
DECAY = {"cache.decay": ("0.05", "0.08", "0.1", "0.125", "0.2")}
KEYS = {
    "cache.memory": ("16", "32", "64"),
    "cache.follow": ("0.75", "1.0", "1.25"),
    "cache.half_life": ("8", "12", "16"),
    "cache.age": ("0.2", "0.4", "0.6"),
}
DEFAULTS = {
    "cache.half_life": "12",
    "cache.memory": "32",
    "cache.follow": "1.0",
    "cache.age": "0.4",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = ResultFolder(args.out, force=True) if args.out else None
    result: dict[str, Any] = {
        "kind": "cache-policies",
        "traces": [compared(path) for path in args.traces],
        "environment": environment(torch.device("cpu")),
    }
    print(json.dumps(result, indent=1))
    if folder:
        folder.write(result, "".join(f"trace: {path.name}\n" for path in args.traces))


def compared(path: Path) -> dict[str, Any]:
    """Hit rates of one trace's second half at each size."""
    trace = read(path, "")
    fit, report = part_of(trace, 0, 0.5), part_of(trace, 0.5, 1)
    sizes = [round(trace.space.num_ids * share) for share in SHARES]
    visits = Visits.of(report)

    def row(name: str, counts: list[Array], keys: str = "") -> dict[str, Any]:
        hits = [int(c[..., HITS].sum()) / int(c[..., LOOKUPS].sum()) for c in counts]
        return {"policy": name, "keys": keys, "hit_rates": hits}

    def policy_row(cache: str, choice: Choice, name: str = "") -> dict[str, Any]:
        counts = [simulate(visits, made(cache, choice), size) for size in sizes]
        keys = " ".join(f"{key}={value}" for key, value in choice.items())
        return row(name or cache, counts, keys)

    rows = [policy_row(cache, {}) for cache in ("lru", "lfu", "lrfu")]
    rows += [
        policy_row(
            "lrfu", fitted(fit, "lrfu", {"cache.decay": "0.1"}, DECAY, sizes), "lrfu, fitted"
        ),
        policy_row("succession", {}),
        policy_row("succession", fitted(fit, "succession", DEFAULTS, KEYS, sizes), "fitted"),
    ]
    for name, left_out in (
        ("without what followed", ["cache.follow"]),
        ("without age", ["cache.age"]),
        ("without both", ["cache.follow", "cache.age"]),
    ):
        rows.append(policy_row("succession", dict.fromkeys(left_out, "0"), name))
    rows.append(row("belady", [belady(visits, size) for size in sizes]))
    tokens = {"fitted_to": fit.num_tokens, "reported_on": report.num_tokens}
    return {"trace": path.name, "tokens": tokens, "sizes": sizes, "policies": rows}


def made(cache: str, choice: Choice) -> CachePolicy:
    (found,) = choices(cache, {key: [value] for key, value in choice.items()})
    return found.policy


def fitted(
    trace: Trace, cache: str, start: Choice, values: Mapping[str, Any], sizes: list[int]
) -> Choice:
    return search(trace, lambda choice: made(cache, choice), start, values, sizes).best.choice


if __name__ == "__main__":
    main()
