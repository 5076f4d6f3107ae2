"""`--config FILE`: what was written composes again, and overrides come on top of it."""

import json
from dataclasses import asdict
from functools import lru_cache
from itertools import zip_longest
from typing import Any, get_type_hints

import pytest
from command import assert_one_line, assert_refused, residency
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.conf import Config, compose, saved
from residency.conf.build import part_class
from residency.conf.options import GROUPS, option_names, option_node
from residency.conf.root import Root
from residency.conf.saved import read_saved
from residency.policies.errors import ConfigError

OPTIONS = {group: option_names(group) for group in GROUPS}
NODES = {(group, name): option_node(group, name) for group in GROUPS for name in OPTIONS[group]}
TEXTS = (st.text(max_size=8) | st.text("$\\{}a' :#\n\u2028", max_size=8)).filter(
    lambda text: text != "???"
)
VALUES = {
    bool: st.booleans(),
    int: st.integers(-9, 9),
    float: st.floats(-9, 9),
    str: TEXTS,
    int | str: st.integers(-9, 9) | TEXTS,
    list[int]: st.lists(st.integers(-9, 9), max_size=2),
    list[str]: st.lists(TEXTS, max_size=2),
    Any: st.floats(-9, 9) | TEXTS | st.lists(st.integers(-9, 9), max_size=2),
}


@pytest.fixture(scope="module", autouse=True)
def _options_are_looked_up_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "option_names", lru_cache(option_names))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("saved") / "it's a ${config}.yaml"


def read_back(file, tree):
    file.write_text(Config({}, tree).yaml(), encoding="utf-8")
    return compose(saved=read_saved(file))


def filled(node):
    return {key: "x" if value == "???" else value for key, value in node.items()}


def root_keys(value, node=None):
    """A tree of the root keys, all of them switches; `value` gives each one's."""
    node = asdict(Root()) if node is None else node
    return {k: root_keys(value, v) if isinstance(v, dict) else value() for k, v in node.items()}


ALL_ROOT = root_keys(lambda: True)
TREES = [
    {group: filled(NODES[group, name]) for group, name in zip(GROUPS, names, strict=True)}
    for names in zip_longest(*(OPTIONS[group] for group in GROUPS))
    for names in [[n or OPTIONS[g][0] for g, n in zip(GROUPS, names, strict=True)]]
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["cache"]["_target_"])
def test_every_option_reads_back(file, tree):
    config = read_back(file, tree | ALL_ROOT)
    assert config.tree == tree | ALL_ROOT


@st.composite
def trees(draw):
    """Any values of all keys: those that name other options stay."""
    tree = {}
    for group in GROUPS:
        node = filled(NODES[group, draw(st.sampled_from(OPTIONS[group]))])
        cls = part_class(group, node["_target_"])
        named = {key for key, f in cls.Config.__dataclass_fields__.items() if f.metadata}
        types = get_type_hints(cls.Config)
        drawn = {key: draw(VALUES[kind]) for key, kind in types.items() if key not in named}
        tree[group] = node | drawn
    return tree | root_keys(lambda: draw(st.booleans()))


@settings(max_examples=6)
@given(tree=trees())
def test_any_values_read_back(file, tree):
    config = read_back(file, tree)
    assert config.tree == tree
    assert config.yaml() == Config({}, config.tree).yaml()


def test_a_result_holds_the_tree_as_it_is(file):
    tree = compose([r"workload.prompt='\${x}'"]).tree
    file.write_text(json.dumps({"kind": "bench", "config": tree, "speeds": [1]}))
    assert compose(saved=read_saved(file)).tree == tree


@pytest.fixture
def old(file):
    """A file that was written before there were root keys."""
    tree = compose(["cache.slots=7", "cache.decay=0.3", "prefill=auto"]).tree
    file.write_text(Config({}, {group: tree[group] for group in GROUPS}).yaml())
    return file


def over(file, *overrides, **kwargs):
    return compose(overrides, saved=read_saved(file), **kwargs)


def test_overrides_come_on_top(old):
    config = over(old, "cache.slots=9", "prefill=demand", "allow_custom=true")
    cache = config.policies.cache.config
    assert (cache.slots, cache.decay) == (9, 0.3)
    assert config.policies.prefill.name == "demand"
    assert config.root.allow_custom


def test_the_same_choice_keeps_the_file_s_keys_and_another_drops_them(old):
    assert over(old, "cache=lrfu").policies.cache.config.slots == 7
    lru = over(old, "cache=lru").policies.cache
    assert (lru.name, lru.config.slots) == ("lru", "25%")


def test_presets_and_what_choices_bring_come_on_top(old):
    assert over(old, "experiment=everything_resident").policies.cache.config.slots == "all"
    assert over(old, "experiment=nothing_stays").policies.cache.name == "none"
    assert over(old, "decode=cpu").policies.cache.name == "none"
    assert over(old, "decode=cpu", "cache=lrfu").policies.cache.config.slots == 7


def test_interpolations_see_the_file_s_values(file):
    read_back(file, compose(["prefill.groups=5"]).tree)
    assert over(file, "cache.slots=${prefill.groups}").policies.cache.config.slots == 5


def test_a_prompt_replaces_the_file_s(file):
    read_back(file, compose(["workload.prompts=[a,b]"]).tree)
    config = over(file, prompt="x ${y}")
    assert config.workload.prompts == ["x ${y}"]
    assert over(file, prompts=["c", "d"]).workload.prompts == ["c", "d"]
    assert list(config.conflicts()) == []
    assert set(config.tree["workload"]) == set(NODES["workload", "generate"])


def test_a_file_leaves_nothing_behind(old):
    over(old)
    assert compose().tree["cache"]["decay"] == 0.1
    assert option_names("cache") == OPTIONS["cache"]
    with pytest.raises(ConfigError, match="choose one of") as refusal:
        over(old, "cache=residency_saved")
    assert "residency_saved," not in str(refusal.value)


LRU = "cache: {_target_: residency.policies.cache.lru.Lru, "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no config", "--cfg")),
        ("{}", ("no config",)),
        ("allow_custom: true", ("no config",)),
        ("a: [", ("not the YAML",)),
        ("a: 1\na: 2", ("not the YAML", "duplicate key")),
        ("[1, 2]", ("not a mapping",)),
        ("3", ("not the YAML",)),
        ("cache: lru", ("cache", "no _target_", "--cfg")),
        ("cache: {slots: 3}", ("no _target_",)),
        ("cahce: {}", ("cahce", "did you mean cache?")),
        (LRU + "slot: 3}", ("cache.slot", "did you mean slots?")),
        (LRU + "slots: 1.5}", ("cache.slots=1.5", "a whole number or text")),
        (LRU + "slots: '${gone}'}", ("'gone' not found",)),
        (LRU + "slots: 3}\nallow_custom: x", ("allow_custom=x", "true or false")),
        ('{"kind": "run"}', ("config.yaml",)),
        ('{"config": 3}', ("not a mapping",)),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(file, text, words):
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        over(file)
    assert_one_line(str(refusal.value), file, *words)


def test_what_cannot_be_read_is_refused_in_one_line(file, tmp_path):
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path, tmp_path / "gone.yaml"):
        assert_refused(residency("run", "--config", path), path, "cannot be read")


def test_a_file_s_class_of_ones_own_is_refused_unless_allowed(file):
    file.write_text("cache: {_target_: os.path}")
    assert_refused(residency("validate", "--config", file), "os.path", "allow_custom=true")


def test_what_a_run_wrote_runs_again(tmp_path):
    words = ("device=cpu", "workload.max_new_tokens=3", "cache.slots=16", "cache=lru")
    residency("run", "ROMEO:", *words, "--out", tmp_path / "first")
    again = residency("run", "--config", tmp_path / "first/config.yaml", "--json")
    first = json.loads((tmp_path / "first/result.json").read_text())
    assert json.loads(again.stdout)["token_ids"] == first["token_ids"]


def test_each_command_takes_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    words = ("model.context=512", "workload.lengths=[16]", "cache=none")
    file.write_text(residency("bench", *words, "--cfg").stdout)
    assert residency("bench", "--config", file, "--cfg").stdout == file.read_text()
    assert_refused(residency("run", "--config", file), "workload=bench", "workload=generate")
    assert residency("run", "--config", file, "workload=generate", "--cfg").exit_code == 0
    invalid = residency("validate", "--config", file)
    assert invalid.exit_code == 2 and "cache=none" in invalid.stdout
    assert residency("validate", "--config", file, "cache=lru").exit_code == 0
    assert_refused(residency("validate", "--config", file, "--matrix"), "--matrix")
    shown = json.loads(residency("inspect", "--config", file, "--json").stdout)
    plain = json.loads(residency("inspect", "--json").stdout)
    assert shown != plain
