"""What `residency plan` foretells of every committed bench run, beside what was measured.

python benchmarks/plan.py [RESULTS]        writes benchmarks/plan.md

A run is foretold from its own config, its routing and its own `limits` (link, gather, all-resident
times), never from its measured times. What limits do not hold, the
time of an expert on the host, is taken from the other run of the same commit that computed experts
there, and the table says so. Decode is foretold at the hit rate that the run had.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from residency.conf.build import build_part
from residency.conf.options import option_node
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.decode import decode_step
from residency.runtime.forecast.measured import bench_constants, host_line
from residency.runtime.forecast.model_routes import routes_of_model
from residency.runtime.forecast.prefill import PrefillForecast, Shape

HERE = Path(__file__).resolve().parent
PAGE = HERE / "plan.md"
BENCH, MODES = "bench", "prefill_modes"
BAR = 0.15
DECODE = "decode"


@dataclass(frozen=True)
class Row:
    """what: "decode", or the tokens of a prompt. Seconds. source: of constants from another run."""

    run: str
    mode: str
    what: str
    predicted: float
    measured: float
    source: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Run:
    """A committed result and what a forecast of it needs."""

    def __init__(
        self, name: str, result: dict[str, Any], others: dict[str, dict[str, Any]]
    ) -> None:
        self.name, self.result, self._others = name, result, others
        self.config, self.limits = result["config"], result["limits"]
        self.model = build_part("model", self.config["model"])
        self.cache, self.mode, self.decode = (
            build_part(group, self.config[group]) for group in ("cache", "prefill", "decode")
        )
        self.space = self.model.architecture.space
        memory = result["memory"]
        self.shape = Shape(
            self.space, memory["row_bytes"], memory["num_slots"], memory["group_size"]
        )
        self.routes = routes_of_model(self.model)

    def rows(self) -> Iterator[Row]:
        constants = bench_constants([(self.name, self.result)], self.space, self.shape.row_bytes)
        forecast = PrefillForecast(self.mode, self.routes, self.shape, constants)
        for point in self.result["prefill"]:
            prompt = forecast.prompt(point["tokens"])
            measured = point["ttft_s"]["median"]
            yield Row(self.name, self.mode.name, str(point["tokens"]), prompt.seconds, measured)
        yield self._decode_row(constants)

    def _decode_row(self, constants: Constants) -> Row:
        source = ""
        if self.decode.computes_on_host(self.space.num_layers):
            source, line = self._other_host()
            constants = constants.with_host(line, source)
        measured = self.result["decode"]
        step = decode_step(
            self.decode, self.space, self.shape.row_bytes, constants, measured["hit_rate"]
        )
        median = measured["tpot_s"]["median"]
        return Row(self.name, self.decode.name, DECODE, step.seconds, median, source)

    def _other_host(self) -> tuple[str, Any]:
        """Of the same model and commit, decoded on the host by another target."""
        for name, other in self._others.items():
            same = all(
                other[part][key] == self.result[part][key]
                for part, key in (("config", "model"), ("environment", "commit"))
            )
            line = host_line(other, self.space) if same else None
            if line is not None and other["config"]["decode"] != self.config["decode"]:
                return name, line
        raise SystemExit(f"{self.name}: no other run of its commit computed experts on the host")


class ModesRun(Run):
    """Prefill modes by turns."""

    def rows(self) -> Iterator[Row]:
        link = self.limits["link"]["bytes_per_s"]["median"]
        times = [(r["tokens"], r["ttft_s"]["median"]) for r in self.limits["resident"]]
        constants = Constants(link, link, tuple(sorted(times)), None)
        for panel in self.result["panels"]:
            resident = None
            if panel["pool"] == "warm":
                resident = self.routes.resident(self.shape.num_slots)
            for point in panel["points"]:
                for name, measured in point["modes"].items():
                    mode = self._mode(name)
                    forecast = PrefillForecast(mode, self.routes, self.shape, constants)
                    prompt = forecast.prompt(point["tokens"], resident)
                    what = f"{point['tokens']}, {panel['pool']}"
                    median = measured["ttft_s"]["median"]
                    yield Row(self.name, name, what, prompt.seconds, median)

    @cache  # noqa: B019
    def _mode(self, name: str) -> Any:
        """A mode of the comparison, cut as the run's own. Its keys stand behind its name there."""
        own, asked = self.config["prefill"], self.config["workload"]["modes"]
        texts = [text for text in asked if text.split()[0] == name.split()[0]]
        keys = dict(text.split("=") for text in texts[0].split()[1:]) if texts else {}
        node = option_node("prefill", name.split()[0]) | keys
        node |= {key: own[key] for key in ("chunk_tokens", "groups", "ring")}
        return build_part("prefill", node)


def committed(results: Path) -> dict[str, dict[str, Any]]:
    """Results of ours, by name; peers' have no limits."""
    found = {
        f.parent.name: json.loads(f.read_text()) for f in sorted(results.glob("*/result.json"))
    }
    return {
        name: result
        for name, result in found.items()
        if result["kind"] in (BENCH, MODES) and result.get("limits")
    }


def rows_of(results: Path, kind: str) -> list[Row]:
    runs = {name: r for name, r in committed(results).items() if r["kind"] == kind}
    make = Run if kind == BENCH else ModesRun
    return [row for name, result in runs.items() for row in make(name, result, runs).rows()]


def page(bench: list[Row], modes: list[Row]) -> str:
    far = [row for row in modes if abs(row.error) > BAR]
    worst = max(abs(row.error) for row in bench)
    text = (
        "# Plans and what was measured\n\n"
        "Written by `python benchmarks/plan.py`, which says how. Predicted over measured, less 1.\n"
        "\n"
        f"## Bench runs\n\n{len(bench)} times of {len({row.run for row in bench})} runs; the "
        f"largest error is {worst:.1%}, and none may exceed {BAR:.0%}.\n\n"
    )
    text += _table(bench)
    text += (
        f"\n## Prefill modes by turns\n\n{len(modes)} times; {len(modes) - len(far)} of them "
        f"within {BAR:.0%}. The others:\n\n"
    )
    return text + _table(far)


def _table(rows: list[Row]) -> str:
    head = ("run", "mode or target", "tokens", "predicted ms", "measured ms", "error", "host from")
    lines = [head, tuple("---" for _ in head)]
    for row in rows:
        numbers = (f"{row.predicted * 1e3:.2f}", f"{row.measured * 1e3:.2f}", f"{row.error:+.1%}")
        lines.append((row.run, row.mode, row.what, *numbers, row.source or "-"))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    torch.manual_seed(0)
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    PAGE.write_text(page(rows_of(results, BENCH), rows_of(results, MODES)))


if __name__ == "__main__":
    main()
