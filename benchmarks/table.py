"""Fill the table of benchmarks/README.md from result files.

python benchmarks/table.py [RESULTS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEAD = (
    *("run", "what", "weights, routing", "device, commit"),
    *("TTFT ms (x floor)", "decode ms", "misses"),
)


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    files = sorted(results.glob("*/result.json"))
    rows = [row(file) for file in files if json.loads(file.read_text())["kind"] == "bench"]
    page = HERE / "README.md"
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + BEGIN + "\n" + table(rows) + END + after)


def table(rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return "No results yet.\n"
    lines = [HEAD, tuple("---" for _ in HEAD), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(file: Path) -> tuple[str, ...]:
    result = json.loads(file.read_text())
    decode = result["decode"]
    return (
        file.parent.name,
        result["title"],
        f"{'made up' if result['made_up_weights'] else 'real'}, {routing(result)}",
        place(result["environment"]),
        ", ".join(ttft(point) for point in result["prefill"]),
        milliseconds(decode["tpot_s"]["median"]) + times(decode["tpot_s"], decode["floor"]),
        "-" if decode["miss_rate"] is None else f"{decode['miss_rate']:.1%}",
    )


def place(environment: dict[str, str]) -> str:
    return f"{environment['device_name']}, {environment.get('commit', 'unknown')[:7]}"


def ttft(point: dict[str, Any]) -> str:
    time = milliseconds(point["ttft_s"]["median"])
    return f"{point['tokens']}: {time}{times(point['ttft_s'], point['floor'])}"


def times(spread: dict[str, float], floor: dict[str, float] | None) -> str:
    return "" if floor is None else f" ({spread['median'] / floor['own_s']:.2f})"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def routing(result: dict[str, Any]) -> str:
    """The first word or two of the note that names it."""
    notes = [note for note in result["notes"] if note.startswith("routing: ")]
    return notes[0].removeprefix("routing: ").partition(" (")[0] if notes else "the model's"


if __name__ == "__main__":
    main()
