"""Time replays of a recorded trace: four policies at eight pool sizes, and libcachesim's LRU.

python benchmarks/replay.py TRACE [--out DIR]

Each policy's loops are compiled before they are timed. Where libcachesim is installed, its LRU goes
over the same accesses (one at a time, in the same order) at the same sizes, through its reader of
binary files, which is the fastest way it has; ours is then timed alone in one thread too.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.runtime.environment import environment
from residency.runtime.replay.curves import Candidate, draw_curves
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.visits import Visits
from residency.runtime.results import ResultFolder
from residency.runtime.traces import read
from residency.runtime.traces.trace import Trace, trace_of

SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
DECAYS = (0.05, 0.1, 0.5)
RECORD = struct.Struct("<IQIq")  # libcachesim's oracleGeneral: time, id, size, next access


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = ResultFolder(args.out, force=True) if args.out else None
    trace = read(args.trace, "")
    sizes = [round(trace.space.num_ids * share) for share in SHARES]
    candidates = [Candidate("lru", Lru(Lru.Config()))]
    candidates += [Candidate(f"lrfu decay={d}", Lrfu(Lrfu.Config(decay=d))) for d in DECAYS]
    draw_curves(first_tokens(trace, 64), candidates, sizes[:1])  # compiles
    curves = draw_curves(trace, candidates, sizes)
    result: dict[str, Any] = {
        "kind": "replay-speed",
        "accesses": trace.accesses,
        "policies": len(candidates),
        "sizes": sizes,
        "seconds": curves.seconds,
        "seconds_include": "the three bounds at each size",
        "environment": environment(torch.device("cpu")),
    }
    result |= beside_libcachesim(trace, sizes)
    print(json.dumps(result, indent=1))
    if folder:
        folder.write(result, f"trace: {args.trace.name}\n")


def first_tokens(trace: Trace, number: int) -> Trace:
    return trace_of(np.array(trace.ids_NLK[:number]), trace.space.num_experts)


def beside_libcachesim(trace: Trace, sizes: list[int]) -> dict[str, Any]:
    """Seconds of one thread, ours and libcachesim's, for LRU at all sizes."""
    try:
        import libcachesim as library
    except ImportError:
        return {}
    visits = Visits.of(trace)
    start = time.perf_counter()
    for size in sizes:
        simulate(visits, Lru(Lru.Config()), size)
    ours = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".oracleGeneral.bin") as file:
        records = np.zeros(len(visits.ids), dtype="<u4,<u8,<u4,<i8")
        assert records.dtype.itemsize == RECORD.size, "the records are packed"
        records["f1"], records["f2"], records["f3"] = visits.ids + 1, 1, -1
        file.write(records.tobytes())
        file.flush()
        theirs = 0.0
        for size in sizes:
            reader = library.TraceReader(
                trace=file.name,
                trace_type=library.TraceType.ORACLE_GENERAL_TRACE,
                reader_init_params=library.ReaderInitParam(ignore_obj_size=True),
            )
            cache = library.LRU(size)
            start = time.perf_counter()
            cache.process_trace(reader)
            theirs += time.perf_counter() - start
    return {"lru_s": ours, "libcachesim_lru_s": theirs, "ratio": ours / theirs}


if __name__ == "__main__":
    main()
