"""Time to first token by groups and ring, every expert streamed.

python benchmarks/prefill_groups.py --out FOLDER

24 layers of flash_next_moe in nvfp4, made-up weights, even routes, one engine that is rebuilt for
each pair. The first pair is run again at the end, which tells what has drifted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from residency.conf import Config, build_engine, compose
from residency.runtime.bench.measure import RandomPrompts, timed_prefill
from residency.runtime.engine import Engine
from residency.runtime.environment import environment

MODEL = ("model=flash_next_moe", "model.layers=24", "model.routing=even", "cache.slots=1536")
PAIRS = ((8, 3), (2, 2), (4, 2), (8, 2), (16, 3), (32, 4), (1, 2), (8, 3))
LENGTHS = (512, 4096)
WARMUPS, REPEATS = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with build_engine(configured(*PAIRS[0])) as engine:
        rows = []
        for groups, ring in PAIRS:
            engine.rebuild(configured(groups, ring).policies)
            for row in measured(engine):
                rows.append({"groups": groups, "ring": ring, **row})
                print(rows[-1], flush=True)
        result = {
            "kind": "groups",
            "model": "flash_next_moe, 24 layers, nvfp4, made-up weights, even routes",
            "rows": rows,
            "environment": environment(engine.device),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def configured(groups: int, ring: int) -> Config:
    staging = (f"prefill.groups={groups}", f"prefill.ring={ring}")
    return compose(["device=cuda", *MODEL, "prefill=always_stream", *staging])


def measured(engine: Engine) -> list[dict[str, Any]]:
    """Of each length, the times behind the warm-up, in empty slots."""
    prompts, plan, rows = RandomPrompts(engine, 0), engine.runtime.plan, []
    for length in LENGTHS:
        runs = []
        for _ in range(WARMUPS + REPEATS):
            engine.runtime.forget()
            runs.append(timed_prefill(engine, prompts.prompt(length))[0].ttft_s)
        staging_bytes = plan.staging_rows * plan.row_bytes
        rows.append({"tokens": length, "staging_bytes": staging_bytes, "seconds": runs[WARMUPS:]})
    return rows


if __name__ == "__main__":
    main()
