"""`residency trace` and `residency replay`, end to end on the demo model."""

import json

import numpy as np
import pytest
from command import assert_refused, residency
from made_traces import made_trace

from residency.runtime.traces import read
from residency.runtime.traces.writing import save

RUN = ("device=cpu", "workload.max_new_tokens=6", "workload.temperature=0", "cache.slots=25%")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    file = tmp_path_factory.mktemp("recorded") / "routes.safetensors"
    result = residency("trace", "record", file, "-p", "ROMEO:", "-p", "JULIET: O", *RUN, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == read(file).num_tokens
    return file


@pytest.fixture
def made(tmp_path):
    save(made_trace(0, tokens=60), tmp_path / "made.safetensors", "FILE")
    return tmp_path / "made.safetensors"


def test_a_recording_has_all_that_went_through_the_model(recorded):
    trace = read(recorded)
    assert set(trace.requests_N) == {0, 1}
    assert trace.decode_S.sum() == 10  # of 6 new tokens, the last is never put through
    assert trace.step_tokens[~trace.decode_S].tolist() == [
        int((~trace.decoded_N & (trace.requests_N == request)).sum()) for request in (0, 1)
    ]
    sums = trace.probs_NLK.astype(np.float32).sum(axis=2)
    assert (sums > 0.1).all()
    assert "cache=" in trace.about["combination"] and trace.about["model"] == "demo"


def test_a_replay_of_the_recording_counts_as_the_run_did(recorded, tmp_path):
    result = residency("run", "ROMEO:", *RUN, "cache=lru", "cache.slots=16", "--json")
    live = json.loads(result.stdout)["phases"]
    file = tmp_path / "one.safetensors"
    residency("trace", "record", file, "ROMEO:", *RUN, "cache=lru", "cache.slots=16")
    told = json.loads(
        residency("replay", f"trace={file}", "cache=lru", "slots=16", "--json").stdout
    )
    (point,) = told["policies"][0]["points"]
    for phase in live:
        for count in ("lookups", "hits", "misses", "evictions"):
            assert point["phases"][phase["phase"]][count] == phase[count]


def test_info_in_a_table_and_in_json(recorded):
    shown = residency("trace", "info", recorded, env={"COLUMNS": "200"}).stdout
    for word in ("stack distance", "tokens of a chunk", "slots of one LRU", "within / across"):
        assert word in shown
    info = json.loads(residency("trace", "info", recorded, "--json").stdout)
    assert info["requests"] == 2 and 0 < info["reuse"] < 1


def test_import_and_its_refusals(tmp_path):
    np.savez(tmp_path / "r.npz", expert_ids=made_trace(0).ids_NLK, request_offsets=[0, 20, 40])
    (tmp_path / "names.json").write_text('["law", "code"]')
    words = ("trace", "import", tmp_path / "r.npz", tmp_path / "r.safetensors")
    keys = ("--experts", 16, "--prompt-tokens", 8, "--chunk-tokens", 5, "--admit-tokens", 4)
    assert residency(*words, *keys, "--domains", tmp_path / "names.json").exit_code == 0
    trace = read(tmp_path / "r.safetensors")
    assert trace.space.num_experts == 16 and trace.request_names == ["law", "code"]
    assert trace.step_tokens[:3].tolist() == [5, 3, 1]
    assert trace.admits_S[:3].tolist() == [False, True, True]
    assert_refused(residency(*words), "r.safetensors", "--force")
    assert residency(*words, "--force").exit_code == 0
    assert_refused(residency(*words[:3], tmp_path / "r.txt"), ".safetensors")
    assert_refused(residency(*words, "--force", "--chunk-tokens", 0), "--chunk-tokens 0")
    assert_refused(residency("trace", "import", "none.npz", tmp_path / "s.npz"), "no such file")
    assert not (tmp_path / "s.npz").exists()


def test_a_replay_draws_its_curves(made, tmp_path):
    caches = (
        "cache=lru,lrfu",
        "cache.scope=global,per_layer",
        "cache.decay=0.1,0.5",
        "slots=4,50%",
    )
    folder = tmp_path / "out"
    shown = residency("replay", f"trace={made}", *caches, "--out", folder, env={"COLUMNS": "200"})
    for word in (
        "lrfu scope=per_layer decay=0.5",
        "belady with bypass",
        "static",
        "50%",
        "token cycle 4",
    ):
        assert word in shown.stdout
    result = json.loads((folder / "result.json").read_text())
    scopes = ("scope=global", "scope=per_layer")
    assert [c["name"] for c in result["policies"]] == [
        *(f"lru {scope}" for scope in scopes),
        *(f"lrfu {scope} decay={decay}" for scope in scopes for decay in (0.1, 0.5)),
    ]
    bounds = ("belady", "belady with bypass", "static")
    assert [c["name"] for c in result["bounds"]] == [
        *bounds,
        *(f"{bound} per layer" for bound in bounds),
    ]
    assert result["cycle"] == 4
    for curve in result["policies"] + result["bounds"]:
        assert [point["slots"] for point in curve["points"]] == [4, 8]
        for point in curve["points"]:
            assert point["lookups"] == 240 == point["hits"] + point["misses"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "cache.decay: 0.1,0.5" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("cache=lru,lrff",), ("cache=lrff", "did you mean lrfu?")),
        (("cache=lru", "cache.decay=0.1"), ("cache.decay", "none of cache=lru")),
        (("cache.decay=2",), ("cache.decay=2", "mend it")),
        (("cache.decay=x",), ("cache.decay=x", "a number")),
        (("cache=none",), ("cache=none", "no slots")),
        (("cache=lru,lru",), ("named twice",)),
        (("slots=0",), ("slots=0", "above 0")),
        (("slots=99",), ("slots=99", "16 experts in all")),
        (("slots=1",), ("slots=1", "needs 2 experts")),
        (("cache.slots=4",), ("say slots=4",)),
        (("cache.scope=all",), ("cache.scope=all", "global or per_layer")),
        (("decode=gpu",), ("decode", "no such key")),
        (("lru",), ("key=value",)),
        (("slots=4", "slots=8"), ("given twice",)),
    ],
)
def test_what_cannot_be_replayed_is_refused(made, words, told):
    assert_refused(residency("replay", f"trace={made}", *words), *told)


def test_a_replay_needs_a_trace(tmp_path):
    assert_refused(residency("replay", "cache=lru"), "trace=FILE")
    assert_refused(residency("replay", "trace=none.npz"), "trace=none.npz", "no such file")
