"""Whatever is written: a config, a file of another's; only errors of ours come out, in one line."""

import base64
import json
import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest
import torch
from command import assert_one_line
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from made_traces import made_trace
from safetensors.torch import save_file

from residency.conf import compose
from residency.conf.options import GROUPS, option_names, option_node
from residency.conf.root import root_leaves
from residency.conf.saved import read_saved
from residency.policies.errors import ConfigError, ResidencyError
from residency.policies.step import IdSpace
from residency.runtime.checkpoint import Checkpoint
from residency.runtime.cost_profile import VERSION, read_profile
from residency.runtime.link_costs import LinkCosts
from residency.runtime.state_file import SavedState
from residency.runtime.traces.importing import Hints, import_trace
from residency.runtime.traces.reading import read
from residency.runtime.traces.writing import save

MOST_BYTES = 64 << 20  # that a reader of a file of a few KB may take


def few(number):
    """Settings of a test that writes files and composes."""
    suppressed = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return examples(max_examples=number, deadline=None, suppress_health_check=suppressed)


def only_ours(work):
    """What `work` answers, or None where it is refused as it should be."""
    try:
        return work()
    except ResidencyError as error:
        assert_one_line(str(error))
        return None


def bounded(work):
    """As `only_ours`, of a reader that must not take memory because a file says so."""
    tracemalloc.start()
    try:
        answer = only_ours(work)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    return answer


# Overrides.

KEYS = [
    *GROUPS,
    "experiment",
    *root_leaves(),
    *(f"{g}.{key}" for g in GROUPS for name in option_names(g) for key in option_node(g, name)),
]
anything = st.text(max_size=20)
special = st.lists(
    st.sampled_from(
        [*"'\"\\{}[](),=:$?~+@#!*&%|<> \n\t", "${", "oc.env:", "???", "null", "é", "💥"]
    ),
    max_size=12,
).map("".join)
number = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.floats().map(repr),
    st.sampled_from(["1e999", "-0", "0x1F", "1_000", "1e-400", ".nan", "-inf", "9" * 400]),
)
nested = st.recursive(
    st.one_of(number, special, st.sampled_from(["a", "'b'", '"c"'])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: f"[{','.join(each)}]"),
        st.lists(inner, max_size=3).map(
            lambda each: "{" + ",".join(f"k{n}:{v}" for n, v in enumerate(each)) + "}"
        ),
    ),
    max_leaves=6,
)
name = st.one_of(st.sampled_from(KEYS), anything, st.sampled_from(["hydra.run.dir", "a.b.c", ""]))
override = st.one_of(
    anything,
    special,
    st.builds(
        lambda sign, key, value: f"{sign}{key}={value}",
        st.sampled_from(["", "", "", "+", "++", "~"]),
        name,
        st.one_of(anything, special, number, nested),
    ),
)


@few(60)
@given(overrides=st.lists(override, min_size=1, max_size=2))
@example(["model.context=" + "9" * 5000])
@example(["cache.slots=" + "[" * 300])
@example(["workload.prompt=${oc.env:HOME}"])
@example(["cache=\0"])
@example(["model.path='\ud800'"])
@example(["cache@a=lru", "cache=lrfu"])
@example(["cache.slots=1e400"])
@example(["cache._target_=é.ü"])
@example(["++cache.a.b.c=1"])
@example(["debug=3"])
@example(["debug.verify_banks={a:1}"])
@example(["device.threads=1" + "0" * 30])
def test_any_override_is_composed_or_refused_in_one_line(overrides):
    config = only_ours(lambda: compose(overrides))
    if config is not None:
        config.yaml()
        for conflict in only_ours(lambda: list(config.faults(*GROUPS))) or []:
            assert_one_line(str(conflict))


# Files.


def damaged(whole):
    """Of a file's bytes: some changed, some gone, some more, or others altogether."""
    places = st.lists(
        st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )

    def changed(pairs):
        content = bytearray(whole)
        for place, byte in pairs:
            content[place] = byte
        return bytes(content)

    def cut(pair):
        first, last = sorted(pair)
        return whole[:first] + whole[last:]

    where = st.integers(0, len(whole))
    head = st.binary(max_size=8).map(lambda start: start + whole[len(start) :])
    return st.one_of(
        places.map(changed),
        st.tuples(where, where).map(cut),
        st.tuples(where, st.binary(max_size=30)).map(
            lambda p: whole[: p[0]] + p[1] + whole[p[0] :]
        ),
        head,
        st.binary(max_size=200),
    )


def files(folder):
    """Every kind of trace that is read, valid and small, by its name."""
    trace = made_trace(0, tokens=12, prompts=[(2, 5)])
    for suffix in ("safetensors", "npz"):
        save(trace, folder / f"own.{suffix}", "FILE")
    np.save(folder / "bare.npy", trace.ids_NLK)
    ids = trace.ids_NLK.tolist()
    lines = [{"routed_experts": ids, "prompt_tokens": 3, "domain": "a"}] * 2
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parts = [
        {"token": t, "layer": layer, "experts": ids[t][layer], "phase": "decode"}
        for t in range(3)
        for layer in range(2)
    ]
    (folder / "parts.jsonl").write_text("\n".join(map(json.dumps, parts)))
    passes = torch.tensor(ids).permute(1, 0, 2)
    record = {"forward_pass_id": 1, "forward_mode": 2, "topk_ids_of_layer": passes}
    torch.save({"records": [record]}, folder / "sglang.pt")


NAMES = ("own.safetensors", "own.npz", "bare.npy", "requests.jsonl", "parts.jsonl", "sglang.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fuzz")
    files(made)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_valid_before_they_are_damaged(folder, name):
    assert import_trace(str(folder / name)).num_tokens


@pytest.mark.parametrize("name", NAMES)
@few(60)
@given(data=st.data())
def test_a_damaged_trace_is_read_or_refused(folder, name, data):
    file = folder / f"damaged-{name}"
    file.write_bytes(data.draw(damaged((folder / name).read_bytes())))
    hints = Hints(num_layers=2, top_k=2, prompt_tokens=data.draw(st.sampled_from([None, 3])))
    for reader in (lambda: import_trace(str(file), hints), lambda: read(file)):
        trace = bounded(reader)
        if trace is not None:
            assert 0 <= trace.ids_NLK.min() and trace.ids_NLK.max() < trace.space.num_experts
            assert trace.step_offsets[-1] == trace.num_tokens == len(trace.requests_N)


def test_an_npy_within_json_is_no_safer_than_one_beside_it(folder):
    whole, file = (folder / "bare.npy").read_bytes(), folder / "coded.jsonl"

    @few(60)
    @given(content=damaged(whole))
    def look(content):
        line = {"routed_experts": base64.b64encode(content).decode()}
        file.write_text(json.dumps(line))
        bounded(lambda: import_trace(str(file)))

    look()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["routed_experts", "choices", "meta_info", "token", "layer", "experts", "request"]
            )
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@few(120)
@given(lines=st.lists(json_values, min_size=1, max_size=3))
@example([{"routed_experts": [[[1, 2]]], "choices": 3}])
@example([{"experts": [1], "layer": 10**30, "token": 0}])
@example([{"experts": [1e300], "layer": 0, "token": 0}])
@example([{"token": float("inf"), "layer": 0, "experts": [1]}])
@example([{"routed_experts": [[[10**30]]]}])
@example([{"routed_experts": [[[1]]], "prompt_tokens": True}])
def test_any_json_lines_are_read_or_refused(folder, lines):
    file = folder / "any.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    only_ours(lambda: import_trace(str(file)))


@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_json_that_is_nested_without_end_is_refused(folder, kind):
    readers = {
        "deep.jsonl": lambda file: import_trace(str(file)),
        "deep.json": read_saved,
        "costs.json": read_profile,
        "model.safetensors.index.json": lambda file: Checkpoint(file.parent),
    }
    for name, reader in readers.items():
        file = folder / name
        file.write_text(kind * 3000)
        assert only_ours(lambda reader=reader, file=file: reader(file)) is None


def test_a_saved_config_that_is_damaged_is_read_or_refused(folder):
    whole = compose(["cache=lru", "prefill=demand"]).yaml().encode()
    file = folder / "config.yaml"

    @few(25)
    @given(content=damaged(whole))
    def look(content):
        file.write_bytes(content)
        only_ours(lambda: compose([], saved=read_saved(file)))

    look()


def test_a_cost_profile_that_is_damaged_is_read_or_none(folder):
    costs = {"expert_s": 0.1, "answer_s": 0.1, "gap_s": {"1": 0.5}, "host_s": {"16": 0.5}}
    whole = json.dumps({"version": VERSION, "costs": costs}).encode()
    file = folder / "profile.json"

    @few(150)
    @given(content=damaged(whole) | json_values.map(lambda value: json.dumps(value).encode()))
    def look(content):
        file.write_bytes(content)
        costs = read_profile(file)
        assert costs is None or LinkCosts(costs).as_dict()["expert_s"] == costs["expert_s"]

    look()


def test_a_state_file_that_is_damaged_is_read_or_refused(checkpoint, folder):
    from conftest import tiny_engine

    file, damaged_file = folder / "state.safetensors", folder / "damaged.safetensors"
    with tiny_engine(checkpoint, "cache=lru", "cache.slots=6") as engine:
        engine.generate([3, 4, 5], max_new_tokens=3)
        engine.save_state(file)
        space = engine.architecture.space
    policy = compose(["cache=lru", f"cache.warm_start='{damaged_file}'"]).policies.cache

    @few(80)
    @given(content=damaged(file.read_bytes()))
    def look(content):
        damaged_file.write_bytes(content)
        state = bounded(lambda: SavedState.read(policy, space))
        if state is not None:
            assert (0 <= state.slots).all() and (state.slots <= space.num_ids).all()
            held = state.slots[state.slots != space.sink].tolist()
            assert len(set(held)) == len(held)

    look()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", [0, 1, 1]),
        ("slots", [0, 25, 24]),
        ("slots", [-1, 24, 24]),
        ("clock", [-2]),
        ("clock", [1 << 60]),
        ("clock", [1, 2]),
        ("policy.keys", [0] * 24),
    ],
)
def test_a_state_that_cannot_be_is_refused(tmp_path, name, value):
    policy = compose(["cache=lru", f"cache.warm_start='{tmp_path / 'state'}'"]).policies.cache
    space = IdSpace(num_layers=3, num_experts=8, top_k=2)
    tensors = {"slots": torch.tensor([3, 24, 5]).int(), "clock": torch.tensor([7])}
    tensors["policy.keys"] = torch.zeros(25, dtype=torch.int64)
    head = {"format": "residency-state", "version": "1", "policy": policy.name}
    head |= {"config": json.dumps(asdict(policy.config)), "model": json.dumps(asdict(space))}
    save_file(tensors, tmp_path / "state", head)
    assert SavedState.read(policy, space).clock == 7
    tensors[name] = torch.tensor(value, dtype=tensors[name].dtype)
    save_file(tensors, tmp_path / "state", head)
    with pytest.raises(ConfigError) as caught:
        SavedState.read(policy, space)
    assert_one_line(str(caught.value), "cache.warm_start=", tmp_path)


@pytest.mark.parametrize("part", ["index.json", "safetensors"])
def test_a_checkpoint_whose_headers_are_damaged_is_read_or_refused(sharded, part):
    file = sorted(sharded.glob(f"*.{part}"))[0]
    whole = file.read_bytes()

    @few(50)
    @given(content=damaged(whole[:400]))
    def look(content):
        file.write_bytes(content + whole[400:])
        only_ours(lambda: Checkpoint(sharded))

    look()


def test_errors_are_ours_alone():
    with pytest.raises(ZeroDivisionError):
        only_ours(lambda: 1 / 0)
    assert only_ours(lambda: compose(["cache=lru"]))

    def refuses():
        raise ConfigError("x")

    assert only_ours(refuses) is None
