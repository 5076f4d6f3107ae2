"""Draw what turns take in sum, our modes beside a peer.

python benchmarks/conversation_chart.py OURS/result.json PEER/result.json --out FILE.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from residency.runtime.bench.modes_chart import COLORS, GREY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ours", type=Path)
    parser.add_argument("peer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ours, peer = (json.loads(file.read_text()) for file in (options.ours, options.peer))
    if asked(ours) != asked(peer):
        raise SystemExit(f"{options.ours} and {options.peer}: not the same turns")
    picture(ours, peer).savefig(options.out, dpi=150)


def asked(result: dict[str, Any]) -> list[tuple[int, ...]]:
    """Tokens of each turn: new, cached and answered ones, as our run had them."""
    names = ("new_tokens", "cached_tokens", "answer_tokens")
    turns = [turn | turn.get("asked", {}) for turn in result["turns"]]
    return [tuple(turn[name] for name in names) for turn in turns]


def picture(ours: dict[str, Any], peer: dict[str, Any]) -> Figure:
    """Times to first tokens in sum, and with the decode of all answers, turn by turn.

    An answer counts as so many of its median steps: one step a run compiles and captures.
    """
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    to_first, whole = figure.subplots(1, 2)
    lines = {label: [turn["modes"][label] for turn in ours["turns"]] for label in ours["sums"]}
    lines[peer["title"]] = peer["turns"]
    for color, (label, turns) in zip(COLORS, lines.items(), strict=False):
        first_s = [turn["ttft_s"]["median"] for turn in turns]
        steps_s = [
            (turn["tpot_s"] or 0.0) * (asked["answer_tokens"] - 1)
            for turn, asked in zip(turns, ours["turns"], strict=True)
        ]
        all_s = [sum(both) for both in zip(first_s, steps_s, strict=True)]
        _sum(to_first, first_s, label, color=color, lw=1.6)
        _sum(whole, all_s, label, color=color, lw=1.6)
        if all(turn.get("floor") for turn in turns):
            floors_s = [turn["floor"]["own_s"] for turn in turns]
            _sum(to_first, floors_s, "its floor", color=color, lw=0.8, ls="--")
    to_first.set_ylabel("time to first tokens, in sum (s)")
    whole.set_ylabel("with decode at its median step, in sum (s)")
    for axes in (to_first, whole):
        axes.set_xlabel("turns, all sessions one after another")
        for number, turn in enumerate(ours["turns"]):
            if turn["turn"] == 1 and number:
                axes.axvline(number, color=GREY, lw=0.5, ls=":")
        axes.set_xlim(0, len(ours["turns"]))
        axes.set_ylim(bottom=0)
        axes.grid(True, color="#e4e4e4", lw=0.5)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.suptitle(_title(ours, peer), fontsize=10, x=0.01, ha="left")
    return figure


def _sum(axes: Any, seconds: Sequence[float], label: str, **style: Any) -> None:
    sums = [0.0, *accumulate(seconds)]
    axes.plot(range(len(sums)), sums, label=f"{label}: {sums[-1]:.3g} s", **style)


def _title(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    weights = "made-up weights" if ours["made_up_weights"] else "a checkpoint's weights"
    devices = dict.fromkeys(result["environment"]["device_name"] for result in (ours, peer))
    notes = [note for note in (*ours["notes"], *peer["notes"]) if note.startswith("routing: ")]
    routes = dict.fromkeys(note.partition(" (")[0] for note in notes)
    return (
        f"{ours['model']}, experts in {ours['format']}, {weights}, {', '.join(routes)}\n"
        f"ours: {ours['title']}; {' and '.join(devices)}; {len(ours['turns'])} turns"
    )


if __name__ == "__main__":
    main()
