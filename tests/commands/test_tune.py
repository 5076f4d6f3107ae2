"""`residency tune`, end to end on a trace that is made up."""

import json

import pytest
from command import assert_refused, residency
from made_traces import made_trace

from residency.runtime.traces.writing import save


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "routes.safetensors"
    save(made_trace(3, tokens=200), path, "FILE")
    return path


def test_it_ends_with_the_overrides_to_use(file, tmp_path):
    words = (f"trace={file}", "cache=lrfu", "cache.decay=0.01,0.5", "slots=25%,50%")
    told = residency("tune", *words, "--json", "--out", tmp_path / "out").stdout
    result = json.loads(told)
    assert result == json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["kind"] == "tune"
    assert {one["choice"]["cache.decay"] for one in result["fit"]["tried"]} == {
        "0.1",
        "0.01",
        "0.5",
    }
    best = max(result["fit"]["tried"], key=lambda one: sum(one["hit_rates"]))
    assert result["overrides"] == f"cache=lrfu cache.decay={best['choice']['cache.decay']}"
    assert (result["fit"]["trace"]["tokens"], result["trace"]["tokens"]) == (100, 100)
    names = [curve["name"] for curve in result["policies"]]
    assert names == ["tuned", "lrfu by default", "lru"]
    assert [point["slots"] for point in result["policies"][0]["points"]] == [4, 8]
    shown = residency("tune", *words).stdout
    for word in ("tuned", "lrfu by default", "belady", "3 choices", result["overrides"]):
        assert word in shown
    assert "fit: first-half" in (tmp_path / "out" / "config.yaml").read_text()


def test_parts_may_be_shares(file):
    parts = ("fit=0%-80%", "report=80%-100%")
    words = (f"trace={file}", "cache=succession", "cache.follow=0", "slots=4", *parts)
    result = json.loads(residency("tune", *words, "--json").stdout)
    assert (result["fit"]["trace"]["tokens"], result["trace"]["tokens"]) == (160, 40)


DECAYS = ("cache=lrfu", "cache.decay=0.1,0.2")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("cache.decay=0.1",), "give cache=NAME"),
        (("cache=lrfu",), "give cache.KEY=A,B,C"),
        (("cache=lru", "cache.decay=0.1"), "cache=lru has no such key"),
        (("cache=lrfu", "cache.decay=0.1,2"), "cache.decay=2"),
        (("cache=lrfu,lru", "cache.decay=0.1"), "it takes one value"),
        ((*DECAYS, "fit=0%-60%", "report=second-half"), "they share tokens"),
        ((*DECAYS, "fit=third"), "first-half, second-half, or shares"),
        ((*DECAYS, "fit=60%-40%"), "shares of the tokens as 0%-80%"),
        ((*DECAYS, "report=99.9%-100%"), "no step of the trace"),
        ((*DECAYS, "part=1"), "there is no such key"),
        (("cache=belady", "cache.prefill_tokens=1", "x"), "not of the form key=value"),
    ],
)
def test_what_cannot_be_tuned_is_refused(file, words, what):
    assert_refused(residency("tune", f"trace={file}", *words), what)
