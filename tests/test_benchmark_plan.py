"""What is foretold of the committed runs: within 15 % of what was measured, and as printed."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_plan", BENCHMARKS / "plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(script):
    return script.rows_of(BENCHMARKS / "results", script.BENCH)


def test_every_committed_bench_run_is_foretold_within_the_bar(script, rows):
    results = script.committed(BENCHMARKS / "results")
    runs = {name for name, result in results.items() if result["kind"] == script.BENCH}
    assert {row.run for row in rows} == runs
    for name in runs:
        measured = results[name]
        own = {row.what for row in rows if row.run == name}
        assert own == {str(p["tokens"]) for p in measured["prefill"]} | {script.DECODE}
    for row in rows:
        assert abs(row.error) <= script.BAR, row


def test_no_run_is_foretold_from_its_own_times(script, rows):
    """Measured times doctored to nonsense change no prediction of their own run."""
    results = script.committed(BENCHMARKS / "results")
    name = "qwen-demand-even"
    doctored = results[name]
    for point in doctored["prefill"]:
        point["ttft_s"] = {"median": 1e6, "least": 1e6, "most": 1e6}
    doctored["decode"]["tpot_s"] = {"median": 1e6, "least": 1e6, "most": 1e6}
    again = list(script.Run(name, doctored, results).rows())
    before = [row.predicted for row in rows if row.run == name]
    assert [row.predicted for row in again] == before


def test_constants_from_another_run_are_named(rows):
    on_host = [row for row in rows if row.mode in ("cpu", "hybrid")]
    assert len(on_host) == 4
    assert all(row.source and row.source != row.run for row in on_host)


def test_the_page_is_what_the_script_writes(script, rows):
    text = script.PAGE.read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    printed = {(cells[0][2:], cells[2]): cells for cells in lines}
    for row in rows:
        cells = printed[row.run, row.what]
        assert float(cells[3]) == pytest.approx(row.predicted * 1e3, rel=5e-3, abs=0.01)
        assert float(cells[4]) == pytest.approx(row.measured * 1e3, abs=0.01)
