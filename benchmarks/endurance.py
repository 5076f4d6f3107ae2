"""What a process holds over many turns of conversations, and over many engines.

python benchmarks/endurance.py --out FOLDER [--turns 200] [--engines 50] [OVERRIDES]

Turns of different lengths, by a fixed seed, through one engine: each continues what its
conversation has cached, and a conversation that would leave its room ends and another begins. After
each turn the process is looked at: resident memory, tensors, threads and open files, on a GPU the
memory that torch holds; and the turn's counters must come out. Then engines of the same model are
built, used and closed in the same process.

What has been taken once is kept: pages of the allocator, and code that oneDNN makes for each shape
and keeps for 1,024 of them. So resident memory rises until most shapes have occurred; the first
60 % of the turns and engines count as warm-up, and growth is told over the rest, by a line through
it. After the turns the same ones are led through again and again: these must add nothing at all.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from residency.conf import build_engine, compose
from residency.policies.step import Phase
from residency.runtime.engine import Engine
from residency.runtime.environment import environment
from residency.runtime.report import Report

PROC = Path("/proc/self")
INK, RED, BLUE, GREY = "#222222", "#c0392b", "#2166ac", "#888888"
ROOM = 1024  # tokens of a conversation
LONGEST_PROMPT, LONGEST_ANSWER = 48, 24
PANELS = {
    "resident memory (MB)": ("rss_bytes", 1e6, BLUE),
    "tensors": ("tensors", 1, INK),
    "threads": ("threads", 1, GREY),
    "open files": ("open_files", 1, RED),
}


def held(device: torch.device) -> dict[str, int]:
    """What this process holds now. threads: the system's; tensors: all that Python can reach."""
    gc.collect()
    of_torch = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return {
        "rss_bytes": _rss(),
        "device_bytes": of_torch,
        "tensors": sum(type(thing) is torch.Tensor for thing in gc.get_objects()),
        "threads": _count("task") or threading.active_count(),
        "open_files": _count("fd"),
    }


def _rss() -> int:
    """Where the system tells no current size, the largest so far."""
    try:
        pages = int((PROC / "statm").read_text().split()[1])
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return pages * os.sysconf("SC_PAGE_SIZE")


def _count(folder: str) -> int:
    try:
        return len(os.listdir(PROC / folder))
    except OSError:
        return 0


def trimmed() -> None:
    """Give freed pages back, where the C library can: what is left is held."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_counters(engine: Engine, report: Report) -> None:
    """Sums that must come out after every turn, whatever happened in it."""
    row_bytes = engine.runtime.plan.row_bytes
    for row in report.counters:
        assert row.hits + row.misses == row.lookups, row
        assert row.fetched * row_bytes == row.bytes["fetch"], row
        assert row.bytes["stream"] % row_bytes == 0 == row.bytes["d2d"] % row_bytes, row
        if row.phase == Phase.DECODE:
            assert row.fetched + row.computed == row.misses, row
    for phase in report.phases:
        own = [row for row in report.counters if row.phase == phase.phase]
        assert phase.lookups == sum(row.lookups for row in own)
        assert sum(phase.bytes.values()) == sum(sum(row.bytes.values()) for row in own)


def turns(engine: Engine, count: int, seed: int = 0) -> Iterator[tuple[int, Report]]:
    """(tokens held behind the turn, its report). Prompts are random ids of the vocabulary."""
    draw, vocabulary = random.Random(seed), engine.architecture.config.get_text_config().vocab_size
    held_tokens, last, room = 0, -1, min(ROOM, engine.context)
    for _ in range(count):
        size = draw.randint(1, LONGEST_PROMPT)
        answer = draw.randint(1, LONGEST_ANSWER)
        continued = 0 < held_tokens and held_tokens + size + answer + 1 <= room
        prompt = [draw.randrange(vocabulary) for _ in range(size)]
        if continued:
            prompt.insert(0, last)  # the answer's newest token, which no step has seen
        report = engine.generate(
            prompt, max_new_tokens=answer, ignore_eos=True, continued=continued, room=room
        )
        held_tokens, last = engine.keep().num_tokens, report.token_ids[-1]
        yield held_tokens, report


def endure(engine: Engine, count: int) -> list[dict[str, Any]]:
    rows = []
    for number, (tokens, report) in enumerate(turns(engine, count), 1):
        check_counters(engine, report)
        engine.runtime.check()
        totals = {phase.phase: phase for phase in report.phases}
        rows.append(
            {
                "turn": number,
                "held_tokens": tokens,
                "prompt_tokens": report.prompt_tokens,
                "new_tokens": len(report.token_ids),
                "lookups": sum(phase.lookups for phase in totals.values()),
                "hits": sum(phase.hits for phase in totals.values()),
                "bytes": sum(sum(phase.bytes.values()) for phase in totals.values()),
                **held(engine.device),
            }
        )
    return rows


def rounds(engine: Engine, count: int, repeats: int) -> list[dict[str, Any]]:
    """The same turns over and over, so that no shape is new after the first round."""
    rows = []
    for number in range(1, repeats + 1):
        engine.runtime.forget()
        for _, report in turns(engine, count):
            check_counters(engine, report)
        trimmed()
        rows.append({"round": number, **held(engine.device)})
    return rows


def builds(make: Callable[[], Engine], count: int) -> list[dict[str, Any]]:
    """Engines one after another, each used once."""
    rows = []
    for number in range(1, count + 1):
        with make() as engine:
            device = engine.device
            engine.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True)
        del engine
        trimmed()
        rows.append({"engine": number, **held(device)})
    return rows


def warm(rows: list[dict[str, Any]]) -> int:
    return len(rows) * 3 // 5


def growth(rows: list[dict[str, Any]], key: str) -> float:
    """Units a row, by a line through all but the first 60 %, which warm up."""
    values = np.array([row[key] for row in rows[warm(rows) :]], dtype=float)
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 2 else 0.0


def chart(series: dict[str, list[dict[str, Any]]], title: str) -> Figure:
    """A column for turns and one for engines, a row a thing that is held."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    grid = figure.subplots(len(PANELS), len(series), squeeze=False)
    for column, (what, rows) in enumerate(series.items()):
        x = [row[what] for row in rows]
        for axes, (name, (key, unit, color)) in zip(grid[:, column], PANELS.items(), strict=True):
            values = [row[key] / unit for row in rows]
            axes.plot(x, values, color=color, lw=1.2)
            axes.axvspan(x[0], x[warm(rows)], color="#eeeeee", lw=0)
            axes.set_ylim(0, max(values) * 1.15)
            axes.set_title(
                f"{name}: {values[0]:,.4g} at first, {values[-1]:,.4g} at last, "
                f"{round(growth(rows, key) / unit, 4) + 0.0:+g} a {what}",
                fontsize=8,
                loc="left",
            )
            axes.grid(True, color="#dddddd", lw=0.5)
        grid[-1, column].set_xlabel(f"{what} (shaded: warm-up)")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--engines", type=int, default=50)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = compose(options.overrides)
    start = time.perf_counter()
    with build_engine(config) as engine:
        device, plan = engine.device, engine.runtime.plan
        turn_rows = endure(engine, options.turns)
        round_rows = rounds(engine, options.turns // 8, 6)
    turns_s = time.perf_counter() - start
    engine_rows = builds(lambda: build_engine(config), options.engines)
    series = {"turn": turn_rows, "engine": engine_rows}
    result = {
        "kind": "endurance",
        "overrides": options.overrides,
        "slots": plan.num_slots,
        "turns_s": turns_s,
        "engines_s": time.perf_counter() - start - turns_s,
        "growth": {
            what: {key: growth(rows, key) for key, _, _ in PANELS.values()}
            for what, rows in series.items()
        },
        "environment": environment(device),
        "turns": turn_rows,
        "rounds": round_rows,
        "engines": engine_rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    lists = {key: result.pop(key) for key in ("turns", "rounds", "engines")}
    text = json.dumps(result, indent=1)[:-2]
    for key, rows in lists.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        text += f',\n "{key}": [\n  {lines}\n ]'
    (options.out / "result.json").write_text(text + "\n}\n")
    title = f"residency, {plan.num_slots} slots, {environment(device)['device_name']}"
    figure = chart(series, f"{title}: {len(turn_rows)} turns, then {len(engine_rows)} engines")
    figure.savefig(options.out / "chart.png", dpi=110)
    print(json.dumps(result["growth"]))


if __name__ == "__main__":
    main()
