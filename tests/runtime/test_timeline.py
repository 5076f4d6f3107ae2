"""A profile of one chunk and one decode step: it holds what ran, and changes nothing else."""

import json
from collections import defaultdict

import pytest
import torch
from command import assert_refused, residency
from conftest import tiny_engine

from residency.runtime.profile import NOTE, TRACE_NAME, _aligned, _shown
from residency.runtime.timeline import PROCESS, TRACK_NAMES, Track

PROMPT = list(range(3, 23))
CHOICES = {
    "demand": ("cache=lru", "cache.slots=5"),
    "waves and declines": ("cache=lru", "cache.slots=5", "cache.admit_decode=false"),
    "copies on the device": ("cache=lru", "cache.slots=12", "prefill=hit_d2d"),
    "speculates": ("cache=lru", "cache.slots=12", "prefill=speculate"),
    "host computes": ("decode=cpu",),
}


def generated(folder, *overrides, new=2, profiled=True):
    """Token ids, logits, counters and the trace of the second of two equal prompts."""
    words = [*overrides, *(["profile=true"] if profiled else [])]
    logits = []
    with tiny_engine(folder, *words) as engine:
        for _ in range(2):
            logits.clear()
            report = engine.generate(
                PROMPT, max_new_tokens=new, ignore_eos=True, on_logits=logits.append
            )
        files = engine.runtime.profile.files()
    trace = json.loads(files[TRACE_NAME])["traceEvents"] if profiled else None
    return report, torch.stack(logits), trace


@pytest.fixture(scope="module", params=CHOICES.values(), ids=list(CHOICES))
def run(checkpoint, request):
    return generated(checkpoint, *request.param), request.param


def own(events, *tracks):
    return [
        event
        for event in events
        if event["pid"] == PROCESS and event["ph"] == "X" and event["tid"] in tracks
    ]


def ended(event):
    return event["ts"] + event["dur"]


def test_results_are_the_same_bits(checkpoint, run):
    (report, logits, _), overrides = run
    plain, plain_logits, _ = generated(checkpoint, *overrides, profiled=False)
    assert torch.equal(logits, plain_logits)
    assert report.token_ids == plain.token_ids
    assert report.counters == plain.counters
    assert [note for note in report.notes if note.startswith(NOTE)]
    assert not [note for note in plain.notes if "profile" in note]


def test_copies_are_those_that_the_counters_have(run):
    (report, _, events), _ = run  # one chunk and one decode step: all there was
    traced, counted = defaultdict(int), defaultdict(int)
    for event in own(events, Track.COPIES):
        args = event["args"]
        traced[args["phase"], args["layer"], event["name"].partition(":")[0]] += args["bytes"]
    for row in report.counters:
        for source in ("stream", "fetch", "d2d"):
            counted[row.phase, row.layer, source] += row.bytes[source]
    assert traced == {key: num_bytes for key, num_bytes in counted.items() if num_bytes}
    assert traced


def test_every_lot_is_computed_behind_its_copy(run):
    (*_, events), _ = run
    copies = own(events, Track.COPIES)
    for lot in own(events, Track.COMPUTE):
        if not lot["name"].startswith("lot"):
            continue
        for row in lot["args"]["rows"]:
            into = [c for c in copies if row in c["args"]["rows"] and c["ts"] <= lot["ts"]]
            assert into, f"row {row} was never filled"
            assert max(map(ended, into)) <= lot["ts"]
            (last,) = [c for c in into if c is max(into, key=ended)]
            assert last["args"]["layer"] == lot["args"]["layer"]


def test_spans_of_a_track_nest_or_follow_each_other(run):
    (*_, events), _ = run
    for track in Track:
        open_until = []
        for event in sorted(own(events, track), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or ended(event) <= open_until[-1]
            open_until.append(ended(event))


def test_layers_lie_within_their_step_and_all_else_too(run):
    (*_, events), _ = run
    steps = {e["name"]: e for e in own(events, Track.STEPS) if not e["args"]}
    assert set(steps) == {"prefill", "decode"}
    layers = [e["name"] for e in own(events, Track.STEPS) if e["args"]]
    assert layers == [f"layer {i}" for i in range(3)] * 2
    prefill, decode = steps["prefill"], steps["decode"]
    assert ended(prefill) < decode["ts"] < ended(prefill) + 1e5, "a viewer shows both at once"
    for event in own(events, *Track):
        assert any(s["ts"] <= event["ts"] and ended(event) <= ended(s) for s in steps.values())


def test_host_experts_and_policies_have_tracks_of_their_own(checkpoint):
    *_, events = generated(checkpoint, "decode=cpu")
    assert len(own(events, Track.HOST_EXPERTS)) == 3
    *_, events = generated(checkpoint, *CHOICES["demand"])
    names = {event["name"] for event in own(events, Track.POLICY, Track.WAITS)}
    assert {"admission", "touch", "plan", "wait for the router"} <= names


def test_the_format_is_chrome_s(run):
    (*_, events), _ = run
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in "XMsf"
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
    named = {
        (e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M" and e["pid"] == PROCESS
    }
    assert named["process_name", 0] == {"name": "residency"}
    for track in Track:
        assert named["thread_name", track] == {"name": TRACK_NAMES[track]}
    operators = [e for e in events if e["ph"] == "X" and e.get("cat") == "cpu_op"]
    for step in [e for e in own(events, Track.STEPS) if not e["args"]]:
        within = [e for e in operators if step["ts"] <= e["ts"] <= ended(step)]
        assert "aten::mm" in {e["name"] for e in within}, "torch's clock is not ours"


def test_the_last_chunk_and_a_later_decode_step_are_taken(checkpoint):
    report, _, events = generated(checkpoint, "prefill.chunk_tokens=16", new=8)
    steps = [e["name"] for e in own(events, Track.STEPS) if not e["args"]]
    assert steps == ["prefill", "decode"]
    report, _, events = generated(checkpoint, new=1)
    assert [e["name"] for e in own(events, Track.STEPS) if not e["args"]] == ["prefill"]
    assert any(note.endswith("has a chunk of the prompt") for note in report.notes)


def test_a_run_writes_it_beside_the_result(tmp_path):
    words = ("run", "x", "device=cpu", "workload.max_new_tokens=3", "profile=true")
    assert_refused(residency(*words), "profile=true", "--out DIR")
    result = residency(*words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert NOTE in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "out" / TRACE_NAME).read_text())["traceEvents"]
    assert_refused(residency("bench", "profile=true"), "profile=true", "residency run")
    record = residency("trace", "record", tmp_path / "r.npz", "profile=true")
    assert_refused(record, "profile=true", "residency run")


def test_streams_are_named_by_the_marks_that_came_before():
    """On events made up as torch's profiler writes those of a GPU."""
    mark = {"ph": "X", "cat": "gpu_user_annotation", "name": "residency: copies"}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 1.0}
    clock = {"ph": "X", "cat": "user_annotation", "name": "residency: clock", "dur": 0.1}
    names = [{"ph": "M", "name": "thread_name", "tid": tid, "ts": 9.0} for tid in (7, 20)]
    events = [
        *(e | {"pid": 0, "args": {"name": f"stream {e['tid']} "}} for e in names),
        *({"ph": "M", "name": "process_name", "pid": p, "tid": 0, "args": {}} for p in (0, 1)),
        clock | {"pid": 77, "tid": 77, "ts": 1000.0},
        mark | {"pid": 0, "tid": 20, "ts": 1010.0, "dur": 2.0},
        copy | {"pid": 0, "tid": 20, "ts": 2000.0},
    ]
    shown = list(_shown(_aligned(events, clock_s=5.0), begin_s=5.0005))
    assert [e["args"]["name"] for e in shown if e["name"] == "thread_name"] == [
        "stream 7 ",
        "copies (stream 20)",
    ]
    (process,) = [e["args"]["name"] for e in shown if e["name"] == "process_name"]
    assert process == "torch: GPU 0, by stream"
    (only,) = [e for e in shown if e["ph"] == "X"]
    assert (only["name"], only["ts"]) == ("Memcpy HtoD", 5.001e6)


@pytest.mark.gpu
def test_streams_have_our_names_and_a_replayed_step_shows_its_kernels(tmp_path):
    words = ("device=cuda", "workload.max_new_tokens=6", "workload.ignore_eos=true")
    result = residency("run", "x", *words, "profile=true", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "out" / TRACE_NAME).read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    for name in ("compute (", "copies ("):
        assert any(each.startswith(name) for each in names), names
    decode = next(e for e in own(events, Track.STEPS) if e["name"] == "decode")
    kernels = [e for e in events if e["ph"] == "X" and e.get("cat") == "kernel"]
    within = [e for e in kernels if decode["ts"] <= e["ts"] <= ended(decode)]
    assert len(within) > 50
