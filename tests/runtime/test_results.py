"""result.json: its keys are frozen here and equal those that its document explains."""

import json
import re
from pathlib import Path

import pytest
from conftest import tiny_engine

from residency.policies.errors import OutputError
from residency.runtime.counters import Source
from residency.runtime.report import VERSION
from residency.runtime.results import CONFIG_NAME, RESULT_NAME, ResultFolder

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "result-format.md"
TOP = {
    *("version", "text", "finish", "prompt_tokens", "new_tokens", "token_ids"),
    *(
        "ttft_s",
        "tpot_s",
        "step_s",
        "phases",
        "counters",
        "choices",
        "memory",
        "environment",
        "notes",
    ),
}
SEQUENCE = {"text", "finish", "prompt_tokens", "new_tokens", "token_ids", "ttft_s"}
BATCH = TOP - SEQUENCE | {"kind", "sequences", "tokens_per_s"}
COUNTS = {
    *("phase", "lookups", "hits", "misses", "evictions", "computed", "fetched", "bytes"),
    *("ahead", "ahead_in_time", "ahead_used"),
}
COUNTER = {"layer"} | COUNTS
PHASE = COUNTS | {"seconds", "link_seconds", "link_share", "hit_rate"}
MEMORY = {
    *("num_slots", "group_size", "ring", "staging_rows", "row_bytes", "bank_bytes"),
    *("weight_bytes", "dequantised_bytes", "kv_bytes", "workspace_bytes", "device_bytes"),
    *("table_bytes", "mapped_tables", "batch", "snapshot_bytes"),
    *("policy_bytes", "graph_bytes", "reserve_bytes"),
    *("pinned", "pinned_bytes"),
}
SOURCES = {"stream", "fetch", "d2d", "table", "activations"}
ENVIRONMENT = {
    *("device", "device_name", "threads", "cpus", "host_memory", "commit"),  # commit: in a checkout
    *("python", "residency", "torch", "transformers"),
}


ON_A_GPU = {"device_memory", "cuda"}


@pytest.fixture(scope="module")
def result(checkpoint):
    """As a reader of the file gets it."""
    with tiny_engine(checkpoint, "cache.slots=5") as engine:
        report = engine.generate(list(range(3, 20)), max_new_tokens=4, ignore_eos=True)
    return json.loads(json.dumps(report.as_dict()))


def test_version_rises_with_the_frozen_keys():
    assert VERSION == 1


def test_the_top_level_is_frozen(result):
    assert set(result) == TOP
    assert result["version"] == VERSION


def test_each_row_is_frozen(result):
    assert [(row["phase"], row["layer"]) for row in result["counters"]] == [
        (phase, layer) for phase in ("prefill", "decode") for layer in range(3)
    ]
    for row in result["counters"]:
        assert set(row) == COUNTER
        assert set(row["bytes"]) == SOURCES == set(Source)
    assert [phase["phase"] for phase in result["phases"]] == ["prefill", "decode"]
    for phase in result["phases"]:
        assert set(phase) == PHASE
    assert set(result["memory"]) == MEMORY
    assert set(result["environment"]) | {"commit"} == ENVIRONMENT


def test_a_batch_is_frozen_too(checkpoint, sections):
    with tiny_engine(checkpoint, "cache.slots=5") as engine:
        report = engine.generate_batch([[3, 4, 5]], max_new_tokens=4, ignore_eos=True)
    result = json.loads(json.dumps(report.as_dict()))
    assert (result["version"], result["kind"]) == (VERSION, "batch")
    assert set(result) == BATCH
    (one,) = result["sequences"]
    assert set(one) == SEQUENCE
    section = sections["A batch's result.json"]
    assert table_keys(section) | TOP == BATCH | TOP
    sequence = next(line for line in section.splitlines() if line.startswith("| `sequences`"))
    assert set(re.findall(r"`(\w+)`", sequence)) - {"sequences"} == SEQUENCE
    assert result["tokens_per_s"] * sum(result["step_s"]) == pytest.approx(3)


def test_the_numbers_agree_with_one_another(result):
    assert result["new_tokens"] == len(result["token_ids"]) == 4
    assert len(result["step_s"]) == 3
    assert result["prompt_tokens"] == 17
    for phase in result["phases"]:
        own = [row for row in result["counters"] if row["phase"] == phase["phase"]]
        for key in ("lookups", "hits", "misses", "evictions", "computed", "fetched"):
            assert phase[key] == sum(row[key] for row in own)
        for source in SOURCES:
            assert phase["bytes"][source] == sum(row["bytes"][source] for row in own)
        assert phase["hits"] + phase["misses"] == phase["lookups"] > 0


@pytest.fixture(scope="module")
def sections():
    """The text under each heading of the document."""
    parts = re.split(r"^## (.*)$", DOCUMENT.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table_keys(text):
    """The backquoted names in the first column."""
    cells = re.findall(r"^\| (`.*?) \|", text, flags=re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_document_names_the_same_keys(sections):
    top, counter = sections["Top level"], sections["A row of `counters`"]
    assert table_keys(top) == TOP
    environment = next(line for line in top.splitlines() if line.startswith("| `environment`"))
    assert set(re.findall(r"`(\w+)`", environment)) - {"environment"} == ENVIRONMENT | ON_A_GPU
    assert table_keys(counter) == COUNTER
    sources = counter[counter.index("Sources of `bytes`") :]
    assert set(re.findall(r"`(\w+)`\s\(", sources)) == SOURCES
    assert table_keys(sections["A row of `phases`"]) == PHASE - COUNTS
    assert set(re.findall(r"`(\w+)`", sections["`memory`"])) == MEMORY


def test_a_folder_holds_both_files_and_nothing_else(tmp_path):
    ResultFolder(tmp_path / "a" / "b").write({"version": 1}, "cache: {}\n")
    files = {file.name: file.read_text() for file in (tmp_path / "a" / "b").iterdir()}
    assert set(files) == {RESULT_NAME, CONFIG_NAME}
    assert json.loads(files[RESULT_NAME]) == {"version": 1}
    assert files[CONFIG_NAME] == "cache: {}\n"


def test_a_result_is_replaced_only_by_force(tmp_path):
    ResultFolder(tmp_path).write({"version": 1}, "")
    with pytest.raises(OutputError, match="--force"):
        ResultFolder(tmp_path)
    ResultFolder(tmp_path, force=True).write({"version": 2}, "")
    assert json.loads((tmp_path / RESULT_NAME).read_text()) == {"version": 2}
