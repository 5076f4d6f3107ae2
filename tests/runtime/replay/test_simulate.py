"""Invariant 3: replay counts what the live run counted; compiled forms equal the tensor form."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import tiny_engine
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from made_traces import made_trace, traces

from residency.conf import compose
from residency.policies.cache.belady import Belady
from residency.policies.cache.fifo import Fifo
from residency.policies.cache.lfu import Lfu
from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.cache.static import Static
from residency.policies.cache.succession import Succession
from residency.policies.errors import ConfigError
from residency.policies.step import Phase
from residency.runtime.counters import PHASES
from residency.runtime.replay import curves, jit
from residency.runtime.replay.belady import belady
from residency.runtime.replay.compiled import form_of, has_form
from residency.runtime.replay.curves import Candidate, draw_curves
from residency.runtime.replay.simulate import simulate
from residency.runtime.replay.visits import Visits
from residency.runtime.traces import read
from residency.runtime.traces.trace import trace_of
from residency.runtime.traces.writing import save

POLICIES = [
    Lru(Lru.Config()),
    *(Lrfu(Lrfu.Config(decay=decay)) for decay in (0, 0.1, 0.5, 1)),
    Lrfu(Lrfu.Config(prefill_weight=0.1)),
    Fifo(Fifo.Config()),
    *(Lfu(Lfu.Config(half_life=half_life)) for half_life in (0, 3, 64)),
    Succession(Succession.Config()),
    Succession(Succession.Config(half_life=3, follow=0.5, memory=4, age=0)),
    Belady(Belady.Config()),
]
CACHES = {
    f"cache={name} {words}".strip(): compose([f"cache={name}", *words.split()]).policies.cache
    for name, words in (
        ("lru", ""),
        ("lrfu", ""),
        ("lrfu", "cache.prefill_tokens=5 cache.prefill_weight=0.2"),
        ("lrfu", "cache.history=reset"),
        ("lru", "cache.admit_prefill=false"),
        ("lru", "cache.prefill_tokens=20"),
        ("fifo", ""),
        ("lfu", "cache.half_life=8"),
        ("s3fifo", ""),
        ("least_stale", ""),
        ("succession", "cache.memory=4"),
    )
}
keys = st.fixed_dictionaries(
    {},
    optional={
        "scope": st.just("per_layer"),
        "prefill_tokens": st.integers(0, 12),
        "admit_prefill": st.just(False),
    },
)
PROMPT = list(range(3, 40))
needs_numba = pytest.mark.skipif(not jit.COMPILES, reason="numba is not installed")


def live_counts(reports):
    """int64 [phases, L, 4] of all reports together."""
    rows = [row for report in reports for row in report.counters]
    counts = np.zeros((len(PHASES), 1 + max(row.layer for row in rows), 4), dtype=np.int64)
    for row in rows:
        numbers = (row.lookups, row.hits, row.misses, row.evictions)
        counts[PHASES.index(Phase(row.phase)), row.layer] += numbers
    return counts


FEW_REFERENCES = "cache=lrfu cache.prefill_tokens=5 cache.prefill_weight=0.2"
DEMAND, PAST = "prefill.max_tokens=16", "prefill.max_tokens=4"
MODES = [DEMAND, PAST, "prefill=always_stream", "prefill=speculate", "prefill=auto"]


@pytest.mark.parametrize(
    ("cache", "slots", "prefill"),
    [
        *((cache, 7, DEMAND) for cache in CACHES),
        *((cache, 3, mode) for cache in ("cache=lru", FEW_REFERENCES) for mode in MODES[1:]),
        *(("cache=lru", 16, mode) for mode in MODES),
        *(("cache=lru cache.scope=per_layer", 9, mode) for mode in (DEMAND, "prefill=speculate")),
    ],
)
def test_replay_counts_what_the_live_run_counted(checkpoint, tmp_path, cache, slots, prefill):
    """Chunks of 15 tokens in three waves or more at 3 slots; or streamed past the slots."""
    mode = ["prefill=demand", prefill] if "." in prefill else [prefill]
    words = (*cache.split(), *mode, "prefill.chunk_tokens=15", "prefill.groups=4")
    policy = compose(cache.split()).policies.cache
    with tiny_engine(checkpoint, f"cache.slots={slots}", *words) as engine:
        recorder = engine.record_routes()
        reports = []
        for start in (0, 5):
            recorder.next_request()
            prompt = PROMPT[start:] + PROMPT[:start]
            reports.append(engine.generate(prompt, max_new_tokens=12, ignore_eos=True))
        recorder.save(tmp_path / "routes.safetensors")
    trace = read(tmp_path / "routes.safetensors")
    visits, live = Visits.of(trace), live_counts(reports)
    assert trace.step_tokens[:4].tolist() == [15, 15, 7, 1]
    if prefill == "prefill=speculate" and slots == 3:
        assert len(trace.landed_P3) and len(trace.passed_P3) and trace.behind_S[0] == 22
    if prefill != "prefill=auto":
        assert bool(trace.admits_S[0]) == (prefill in (DEMAND, "prefill=speculate"))
    assert live[..., 3].any(axis=1)[PHASES.index(Phase.DECODE)]  # something was evicted
    for compiled in (False, True):
        replayed = simulate(visits, policy, slots, compiled=compiled)
        assert np.array_equal(replayed, live), f"compiled={compiled}"


@needs_numba
@examples(max_examples=20)
@given(traces(), st.sampled_from(POLICIES), st.integers(3, 12), keys)
def test_the_compiled_form_equals_the_tensor_form(trace, policy, slots, keys):
    """With prompts in waves, passing by and landed; a part of them references; slots per layer."""
    assert has_form(policy)
    visits, own = Visits.of(trace), type(policy)(replace(policy.config, **keys))
    size = slots * own.num_shares(trace.space)
    forms = (simulate(visits, own, size, compiled=c) for c in (True, False))
    assert np.array_equal(*forms)


@needs_numba
def test_both_forms_rebase_as_the_live_run_does(monkeypatch):
    """A horizon of 32 tokens, met five times."""
    monkeypatch.setattr(Lrfu, "horizon", 32)
    visits, policy = Visits.of(made_trace(1, tokens=100)), Lrfu(Lrfu.Config())
    shifts = []
    monkeypatch.setattr(
        Lrfu, "rebase", lambda self, n, real=Lrfu.rebase: (shifts.append(n), real(self, n))
    )
    counts = [simulate(visits, policy, 5, compiled=compiled) for compiled in (True, False)]
    assert np.array_equal(*counts)
    assert shifts == [16] * 10


def test_a_policy_without_a_compiled_form_is_replayed_in_its_tensor_form():
    class Own(Lru):
        """Ranks as lru does."""

    own = Own(Own.Config())
    visits = Visits.of(made_trace(2))
    assert form_of(own, visits, 5) is None
    assert np.array_equal(simulate(visits, own, 5), simulate(visits, Lru(Lru.Config()), 5))


def test_without_numba_the_tensor_form_runs_and_it_is_said_once(monkeypatch):
    trace, policies = made_trace(3), [Candidate("a", POLICIES[0]), Candidate("b", POLICIES[1])]
    with_it = draw_curves(trace, policies, [4, 8])
    monkeypatch.setattr(curves, "COMPILES", False)
    monkeypatch.setattr("residency.runtime.replay.compiled.COMPILES", False)
    without = draw_curves(trace, policies, [4, 8])
    assert [curve.form for curve in without.policies] == ["tensor", "tensor"]
    assert len(without.notes) == 1 and "numba" in without.notes[0]
    for one, other in zip(with_it.policies, without.policies, strict=True):
        assert [p.as_dict() for p in one.points] == [p.as_dict() for p in other.points]


def test_a_replay_without_numba_installed(tmp_path):
    """The bounds' loops run as plain Python then, and count the same."""
    trace, candidates = made_trace(6), [Candidate("lru", POLICIES[0])]
    save(trace, tmp_path / "t.npz", "FILE")
    code = (
        "import sys; sys.modules['numba'] = None; from residency.cli import main; "
        "sys.argv[1:] = sys.argv[2:]; main()"
    )
    words = ["replay", f"trace={tmp_path}/t.npz", "cache=lru", "slots=5", "--json"]
    ran = subprocess.run(
        [sys.executable, "-c", code, "-", *words], capture_output=True, text=True, check=True
    )
    told = json.loads(ran.stdout)
    here = draw_curves(trace, candidates, [5])
    assert told["policies"][0]["form"] == "tensor" and "numba" in told["notes"][0]
    for group, curves_here in (("policies", here.policies), ("bounds", here.bounds)):
        for curve, other in zip(told[group], curves_here, strict=True):
            assert curve["points"] == other.as_dict()["points"]


def test_a_recording_of_another_target_is_told():
    trace = replace(made_trace(6), about={"combination": "cache=lru prefill=demand decode=hybrid"})
    drawn = draw_curves(trace, [Candidate("lru", POLICIES[0])], [8])
    assert any("decode=hybrid" in note for note in drawn.notes)


def test_a_pool_below_the_token_cycle_is_told_of():
    """Four slots are needed for two layers' top-2."""
    notes = [draw_curves(made_trace(6), [Candidate("lru", POLICIES[0])], [n]).notes for n in (3, 4)]
    assert any("token cycle of 4" in note for note in notes[0])
    assert not any("token cycle" in note for note in notes[1])


def test_slots_per_layer_are_a_pool_for_each():
    """Its layers alone are traces of one layer."""
    trace = made_trace(4, layers=3)
    per_layer = Candidate("lru", Lru(Lru.Config(scope="per_layer")))
    drawn = draw_curves(trace, [per_layer], [9])
    alone = [trace_of(trace.ids_NLK[:, layer : layer + 1], 8) for layer in range(3)]
    policy = POLICIES[0]
    counts = np.concatenate([simulate(Visits.of(one), policy, 3) for one in alone], axis=1)
    assert np.array_equal(drawn.policies[0].points[0].counts, counts)
    assert drawn.bounds[0].name == "belady per layer"
    bounds = np.concatenate([belady(Visits.of(one), 3) for one in alone], axis=1)
    assert np.array_equal(drawn.bounds[0].points[0].counts, bounds)


def test_slots_that_cannot_be_shared_out_are_refused():
    policy = Lru(Lru.Config(scope="per_layer"))
    with pytest.raises(ConfigError, match=r"slots=10 .* evenly among 3 .*slots=9"):
        simulate(Visits.of(made_trace(5, layers=3)), policy, 10)


@pytest.mark.parametrize("slots", [4, 7])
def test_the_policy_belady_is_the_bound(slots):
    visits = Visits.of(made_trace(8, prompts=[(3, 12), (20, 24)]))
    for compiled in (True, False):
        counts = simulate(visits, Belady(Belady.Config()), slots, compiled=compiled)
        assert np.array_equal(counts, belady(visits, slots))


@needs_numba
@pytest.mark.parametrize("scope", ["global", "per_layer"])
def test_static_keeps_what_a_profile_counts(tmp_path, scope):
    trace = made_trace(9, prompts=[(0, 10)])
    counts = [
        np.bincount(trace.ids_NLK[:, layer].ravel(), minlength=8).tolist() for layer in (0, 1)
    ]
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    policy = Static(Static.Config(profile=str(tmp_path / "counts.json"), scope=scope))
    forms = [simulate(Visits.of(trace), policy, 6, compiled=c) for c in (True, False)]
    assert np.array_equal(*forms)
    assert not forms[0][..., 3].any() and forms[0][..., 1].any()


def test_a_pool_that_a_decode_step_does_not_fit_into_is_refused():
    with pytest.raises(ConfigError, match=r"slots=1: .* needs 2 experts .* slots=2"):
        simulate(Visits.of(made_trace(5)), POLICIES[0], 1)
