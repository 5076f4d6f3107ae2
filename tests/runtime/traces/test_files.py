"""Trace files: what is written is read, mapped; what is broken is refused in one line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from made_traces import made_trace, traces

from residency.policies.errors import ConfigError
from residency.runtime.traces import read
from residency.runtime.traces.trace import Phases, trace_of
from residency.runtime.traces.writing import save

ARRAYS = ("ids_NLK", "step_offsets", "decode_S", "admits_S", "requests_N", "probs_NLK")


def assert_same(one, other):
    assert one.space == other.space
    for name in ARRAYS:
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        if first is not None:
            assert first.dtype == second.dtype and np.array_equal(first, second), name


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@examples(max_examples=15)
@given(trace=traces())
def test_what_is_written_is_read(tmp_path_factory, suffix, trace):
    file = tmp_path_factory.mktemp("traces") / f"routes.{suffix}"
    save(trace, file, "FILE")
    assert_same(read(file), trace)


def test_a_trace_file_is_mapped_and_compact(tmp_path):
    file, ids = tmp_path / "routes.safetensors", made_trace(0, tokens=500).ids_NLK
    probs = np.full(ids.shape, 0.5, dtype=np.float16)
    save(trace_of(ids, 8, probs_NLK=probs, about={"domains": ["a"]}), file, "FILE")
    trace = read(file)
    assert isinstance(trace.ids_NLK, np.memmap) and isinstance(trace.probs_NLK, np.memmap)
    assert trace.request_names == ["a"]
    per_token = ids[0].size * 3 + 8 + 2 + 4  # an id and a weight each; a step and a request
    assert file.stat().st_size <= 500 * per_token + 1000


def test_wide_layers_take_two_bytes_an_id(tmp_path):
    file = tmp_path / "routes.safetensors"
    save(trace_of(np.array([[[3, 511]]]), 512), file, "FILE")
    assert read(file).ids_NLK.dtype == np.uint16


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_file_that_is_cut_short_is_refused(tmp_path, suffix):
    file = tmp_path / f"routes.{suffix}"
    save(made_trace(0), file, "FILE")
    whole = file.read_bytes()
    for length in (0, 4, 60, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=f"^trace={file}: "):
            read(file)


def test_a_safetensors_file_that_is_no_trace_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="its format is pt"):
        read(checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (([0, 2, 3], [True], [True]), "not as many"),
        (([0, 2], [True], [True]), "do not cover the 3"),
        (([0, 2, 2, 3], [True] * 3, [True] * 3), "do not cover the 3"),
    ],
)
def test_steps_that_do_not_cover_the_tokens_are_refused(steps, reason):
    ids = np.array([[[0, 1]]] * 3)
    with pytest.raises(ConfigError, match=reason):
        trace_of(ids, steps=tuple(map(np.array, steps)))


def test_tokens_without_steps_are_cut_by_phase_and_request():
    trace = trace_of(
        np.array([[[0, 1]]] * 11),
        decoded_N=np.array([0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1]),
        requests_N=np.array([0] * 7 + [1] * 4),
        phases=Phases(chunk_tokens=3, admit_tokens=2),
    )
    assert trace.step_tokens.tolist() == [3, 2, 1, 1, 2, 1, 1]
    assert trace.decode_S.tolist() == [False, False, True, True, False, True, True]
    assert trace.admits_S.tolist() == [False] + [True] * 6
    assert trace.step_clocks.tolist() == [2, 4, 5, 6, 8, 9, 10]
