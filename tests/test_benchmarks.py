"""The benchmark scripts: a table from result files, peers' fields as ours, dry runs of kernels."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from command import assert_one_line, residency
from packaging.version import Version

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ROUTED_GUESSED = [0, 1, 2, 2], [0, 2, 2, 2]


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    """A folder of one run of ours and one of a peer."""
    folder = tmp_path_factory.mktemp("results")
    few = ["lengths=[4]", "decode_tokens=2", "decode_context=3", "repeats=1", "warmups=0"]
    model = ["model=folder", f"model.path={checkpoint}", "device=cpu", "model.routing=even"]
    workload = [f"workload.{text}" for text in few]
    ran = residency("bench", *model, *workload, "--out", folder / "ours")
    assert ran.exit_code == 0, ran.output
    common = script(BENCHMARKS / "peers" / "common.py")
    common.write(
        Namespace(model=Path("m"), out=folder / "peer", repeats=1),
        "peer",
        ("no-such-package",),
        prefill=[common.prefill(4, [0.5])],
        decode=common.decode(2, [0.5], miss_rate=0.25),
        notes=["routing: model (routers are made up too)"],
    )
    return folder


def test_a_peer_has_the_fields_of_a_bench(results):
    ours, peer = (json.loads((results / n / "result.json").read_text()) for n in ("ours", "peer"))
    assert set(ours) == set(peer)
    assert set(ours["prefill"][0]) == set(peer["prefill"][0])
    assert set(ours["decode"]) == set(peer["decode"])


def test_the_table_has_a_row_of_each_run(results):
    table = script(BENCHMARKS / "table.py")
    rows = [table.row(file) for file in sorted(results.glob("*/result.json"))]
    assert [row[0] for row in rows] == ["ours", "peer"]
    assert rows[0][2] == "real, even" and rows[1][2] == "made up, model"
    assert rows[1][4:] == ("4: 500", "250", "25.0%")
    assert table.table(rows).count("\n") == 4


def test_the_page_has_room_for_the_table():
    page = (BENCHMARKS / "README.md").read_text()
    table = script(BENCHMARKS / "table.py")
    assert page.count(table.BEGIN) == page.count(table.END) == 1


def test_the_runs_can_be_parsed():
    subprocess.run(["bash", "-n", str(BENCHMARKS / "run.sh")], check=True)
    for file in BENCHMARKS.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")


def interpreter_counts_loops():
    """triton's up to 3.6 asks numpy to make an int of a tensor of one element, which numpy from
    2.4 on does not.
    """
    triton, numpy = (Version(version(name)) for name in ("triton", "numpy"))
    return triton >= Version("3.7") or numpy < Version("2.4")


# Some of them take tens of seconds in the interpreter, and launch what the kernels' own tests do.
@pytest.mark.skipif(not interpreter_counts_loops(), reason="an interpreter for an older numpy")
@pytest.mark.parametrize(
    "name",
    [
        "experts",
        *(pytest.param(n, marks=pytest.mark.gpu) for n in ("dense", "pieces", "qwen4_layers")),
    ],
)
def test_a_kernels_benchmark_runs_dry(name, tmp_path):
    file = BENCHMARKS / "kernels" / f"{name}.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, file, "--dry-run", "--out", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["kind"] == f"kernels-{name}" and result["dry_run"]
    assert result["errors"]
    assert result["chunks"] if name == "pieces" else result["times"]
    assert all(row["us"] is None for row in result["times"])


@pytest.fixture(scope="module")
def router_guess():
    return script(BENCHMARKS / "router_guess.py")


def test_a_guess_of_trained_routers_names_more_than_popularity_does(router_guess):
    result = router_guess.measured(["model=demo", "device=cpu"], most_windows=2)
    assert [text["text"] for text in result["texts"]] == list(router_guess.TEXTS)
    for text in result["texts"]:
        assert text["tokens"] == text["earlier_tokens"] == router_guess.WINDOW
        one, *_ = text["chunks"]
        assert one["routed"] == one["named"] == result["top_k"]
        assert one["recall"] == one["precision"] > 2 * one["popular_recall"]
        assert len(one["recall_by_layer"]) == 7


def test_shares_of_a_chunk_count_distinct_experts(router_guess):
    """Two chunks of two tokens, top-1 of four experts; expert 3 was the most popular, then 0."""
    marks = [torch.nn.functional.one_hot(torch.tensor(ids), 4).bool() for ids in ROUTED_GUESSED]
    shares = router_guess.shares_of(router_guess.Layer(*marks, torch.tensor([5, 0, 1, 9])), 2)
    assert shares == {
        "routed": 1.5,
        "named": 1.5,
        "recall": 2 / 3,
        "precision": 2 / 3,
        "popular_recall": 1 / 3,
        "popular_precision": 1 / 3,
    }


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=qwen3_30b_a3b"], ("model=qwen3_30b_a3b", "made up")),
        (["model=demo", "model.routing=even"], ("model.routing=even", "model.routing=model")),
    ],
    ids=["made-up weights", "replaced routes"],
)
def test_guesses_of_no_meaning_are_refused(overrides, words, router_guess, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["router_guess.py", "--out", str(tmp_path), *overrides])
    with pytest.raises(SystemExit) as refused:
        router_guess.main()
    assert_one_line(str(refused.value), *words)
    assert not list(tmp_path.iterdir())


def test_a_scan_that_counts_for_nothing_is_the_same_in_every_mode():
    """Rates of a small course, through the executors."""
    scan = script(BENCHMARKS / "scan_resistance.py")
    small = {"PROMPT_A": 9, "WARM": 8, "COUNTED": 12, "PROMPT_B": 40, "SIZE_A": 41, "SIZE_B": 52}
    vars(scan).update(small, CHUNK=16, CACHES={"lrfu": [{"prefill_tokens": 0}]})
    vars(scan).update(MODES={name: ("prefill.chunk_tokens=16",) for name in scan.MODES})
    space = scan.IdSpace(2, 16, 2)
    routes = scan.skewed(space, 0).table_NLK.long()
    case = scan.Case("small", space, routes[:41], routes[41:93])
    stream, demand = scan.measured(case, ["device=cpu", "cache.slots=25%"])
    rates = [f"{name}{few}" for name in ("before", "after", "return") for few in ("", "_8")]
    assert [stream[name] for name in rates] == [demand[name] for name in rates]
    assert 0 < stream["after"] < 1
    assert scan.table([stream, demand]).count("\n") == 2
