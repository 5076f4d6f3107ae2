"""Traces that others wrote: SGLang's and vLLM's recorders, numpy's arrays, JSON lines."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from made_traces import made_trace

from residency.policies.errors import ConfigError
from residency.runtime.traces.importing import Hints, import_trace
from residency.runtime.traces.trace import UNKNOWN, Phases

IDS = made_trace(0, tokens=9).ids_NLK.astype(np.int32)


def lines(file, *objects):
    file.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return str(file)


def npy(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def test_an_array_of_one_request(tmp_path):
    """What vLLM returns as `routed_experts`, saved by numpy."""
    (tmp_path / "routes.npy").write_bytes(npy(IDS))
    trace = import_trace(str(tmp_path / "routes.npy"), Hints(num_experts=8, prompt_tokens=4))
    assert np.array_equal(trace.ids_NLK, IDS)
    assert trace.step_tokens.tolist() == [4, 1, 1, 1, 1, 1]
    assert trace.decoded_N.tolist() == [False] * 4 + [True] * 5


def test_arrays_of_several_requests(tmp_path):
    np.savez(tmp_path / "r.npz", expert_ids=IDS, request_offsets=[0, 5, 9])
    trace = import_trace(str(tmp_path / "r.npz"), Hints(prompt_tokens=3))
    assert trace.requests_N.tolist() == [0] * 5 + [1] * 4
    assert trace.decoded_N.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True]


def test_json_lines_of_requests_as_servers_return_them(tmp_path):
    """Nested lists, vLLM's base64 of an .npy, and SGLang's of int32 within meta_info."""
    encoded = base64.b64encode(npy(IDS)).decode()
    flat = base64.b64encode(IDS.tobytes()).decode()
    file = lines(
        tmp_path / "r.jsonl",
        {"routed_experts": IDS.tolist(), "prompt_tokens": 4, "domain": "law"},
        {"choices": [{"routed_experts": encoded}], "prompt_tokens": 2, "domain": "code"},
        {"meta_info": {"routed_experts": flat}, "prompt_tokens": 9, "domain": "law"},
    )
    trace = import_trace(file, Hints(8, IDS.shape[1], IDS.shape[2]))
    assert np.array_equal(trace.ids_NLK, np.concatenate([IDS] * 3))
    assert trace.requests_N.tolist() == [0] * 9 + [1] * 9 + [2] * 9
    assert trace.request_names == ["law", "code", "law"]
    assert trace.decoded_N.sum() == 5 + 7
    with pytest.raises(ConfigError, match=r"line 3: .*--layers and --top-k"):
        import_trace(file, Hints(8))


def test_json_lines_of_tokens_and_layers(tmp_path):
    cells = [
        {"request": 5, "token": token, "layer": layer, "experts": IDS[token, at].tolist()}
        | {"probs": [0.75, 0.25], "phase": "prefill" if token < 2 else "decode"}
        for token in range(9)
        for at, layer in enumerate((1, 3))
    ]
    trace = import_trace(lines(tmp_path / "r.jsonl", *cells[::-1]), Hints(8))
    assert np.array_equal(trace.ids_NLK, IDS[::-1])
    assert trace.probs_NLK[0, 0].tolist() == [0.75, 0.25]
    assert trace.decoded_N.tolist() == [True] * 7 + [False] * 2
    assert set(trace.requests_N) == {5}
    with pytest.raises(ConfigError, match="17 lines are not 9 tokens x 2 layers"):
        import_trace(lines(tmp_path / "r.jsonl", *cells[1:]), Hints(8))
    with pytest.raises(ConfigError, match=r"line 19: .* a second time"):
        import_trace(lines(tmp_path / "r.jsonl", *cells, cells[0]), Hints(8))


def sglang_record(number, mode, ids, lengths=None):
    """Layer 0 is dense: nothing was written there."""
    layers = torch.from_numpy(np.concatenate([ids[:, :1] * 0, ids], axis=1).transpose(1, 0, 2))
    own = {"forward_pass_id": number, "rank": 0, "forward_mode": mode}
    return own | {"topk_ids_of_layer": layers.contiguous(), "extend_seq_lens": lengths}


def test_sglangs_recorder(tmp_path):
    """Forward passes in any order, of physical experts, two of which stand for expert 0."""
    physical = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0]] * 3)
    moved = np.where(IDS == 0, 8, IDS)
    records = [
        sglang_record(9, 2, moved[7:9]),
        sglang_record(3, 1, moved[:6], [4, 2]),
        sglang_record(5, 2, moved[6:7]),
    ]
    content = {"records": records, "last_physical_to_logical_map": physical}
    torch.save(content, tmp_path / "r.pt")
    trace = import_trace(str(tmp_path / "r.pt"), Hints(phases=Phases(admit_tokens=4)))
    assert np.array_equal(trace.ids_NLK, IDS)
    assert trace.space.num_experts == 8
    assert trace.step_tokens.tolist() == [6, 1, 2]
    assert trace.decode_S.tolist() == [False, True, True]
    assert trace.admits_S.tolist() == [False, True, True]
    assert trace.requests_N.tolist() == [0] * 4 + [1] * 2 + [1] + [UNKNOWN] * 2
    assert trace.step_clocks.tolist() == [5, 6, 7]


def test_counts_are_no_routes(tmp_path):
    for content in (
        {"rank": 0, "logical_count": torch.zeros(1, 2, 8)},
        {"records": [{"global_physical_count": torch.zeros(2, 8)}]},
    ):
        torch.save(content, tmp_path / "r.pt")
        with pytest.raises(ConfigError, match="mode per_token"):
            import_trace(str(tmp_path / "r.pt"))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("r.txt", b"0 1", "traces are read from files named"),
        ("r.jsonl", b"", "no line in it"),
        ("r.jsonl", b"[1]\n", "line 1: not a JSON object"),
        ("r.jsonl", b"{", "line 1: not JSON"),
        ("r.jsonl", b'{"routed_experts": "!"}', "line 1: routed_experts cannot be read"),
        ("r.jsonl", b'{"routed_experts": [[0, 1]]}', "line 1: routed_experts is not integers"),
        ("r.jsonl", b'{"routed_experts": [[[0, 0]]]}', "twice"),
        ("r.jsonl", b'{"routed_experts": [[[0]]], "prompt_tokens": 2}', "prompt_tokens=2 of 1"),
        ("r.pt", b"nothing", "not a .pt file"),
        ("r.npy", npy(IDS.astype(float)), "float64"),
        ("r.npz", b"PK", "not an .npz"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_in_one_line(tmp_path, name, content, reason):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        import_trace(str(file))
    assert str(error.value).startswith(f"{file}: ") and reason in str(error.value)
    assert "\n" not in str(error.value)


def test_domains_are_a_name_a_request(tmp_path):
    source = lines(tmp_path / "r.jsonl", {"routed_experts": IDS.tolist()})
    (tmp_path / "names.json").write_text('["law"]')
    assert import_trace(source, Hints(8), str(tmp_path / "names.json")).request_names == ["law"]
    (tmp_path / "names.json").write_text('["law", "code"]')
    with pytest.raises(ConfigError, match="a list of 1 names"):
        import_trace(source, Hints(8), str(tmp_path / "names.json"))
