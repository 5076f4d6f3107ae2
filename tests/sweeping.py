"""Sweeps small enough for tests: over a tiny checkpoint, on one thread."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLI = "from residency.cli import main; main()"


def tiny(checkpoint):
    """What all jobs of a tiny sweep share."""
    return [
        *("model=folder", f"model.path={checkpoint}", "model.dtype=float32", "model.context=32"),
        *("device=cpu", "device.threads=1", "workload.lengths=[5,12]", "workload.decode_tokens=3"),
        *("workload.decode_context=7", "workload.repeats=1", "workload.warmups=0"),
    ]


def started(*args):
    """`residency ARGS` in a process of its own, which is not waited for."""
    return subprocess.Popen(
        [sys.executable, "-c", CLI, *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(seen, timeout_s=300):
    """Until `seen()` is true; its value."""
    end = time.monotonic() + timeout_s
    while not (value := seen()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def results(folder: Path):
    """The whole results of a sweep, by the name of their folder."""
    return {file.parent.name: json.loads(file.read_text()) for file in folder.glob("*/result.json")}


def counts(result):
    """What a job counted and chose: all that must not depend on the clock."""
    if "tokens" in str(result.get("kind")) or "prefill" not in result:
        rows = {key: result.get(key) for key in ("counters", "token_ids", "text", "sequences")}
        return rows | {"memory": result["memory"]}
    samples = [*result["prefill"], result["decode"]]
    timed = {"seconds", "link_seconds", "link_share"}
    totals = [
        {key: value for key, value in run["totals"].items() if key not in timed}
        for sample in samples
        for run in sample["runs"]
    ]
    return {"totals": totals, "memory": result["memory"], "plan": result["plan"]}
