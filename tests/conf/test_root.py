"""Root keys: typed, checked and written as those of options are."""

import sys
from dataclasses import dataclass, field

import pytest
from command import assert_one_line, assert_refused, residency

from residency.conf import compose
from residency.conf import root as root_module
from residency.conf.build import part_class
from residency.conf.options import option_node
from residency.conf.root import Root, build_root, root_leaves
from residency.policies.errors import ConfigError

POLICY = '''"""my_own: lru, its slots given otherwise."""

from dataclasses import dataclass

from residency.policies.cache.lru import Lru


class MyPolicy(Lru):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Lru.Config):
        boost: int = 1
        slots: int | str = "50%"
'''
TARGET = "cache._target_=my_own_module.MyPolicy"


def test_the_defaults_are_those_of_the_class_and_in_the_tree():
    config = compose()
    assert config.root == Root()
    for key in root_leaves():
        node = config.tree
        for name in key.split("."):
            node = node[name]
        value = Root()
        for name in key.split("."):
            value = getattr(value, name)
        assert (type(node), node) == (type(value), value)
        assert key.rpartition(".")[2] in f"{Root.__doc__}{root_module.Debug.__doc__}"


@pytest.mark.parametrize("text", ["allow_custom=true", "++allow_custom=true"])
def test_a_root_key_is_an_override(text):
    config = compose([text])
    assert config.root == Root(allow_custom=True)
    assert config.tree["allow_custom"] is True
    assert "\nallow_custom: true\n" in config.yaml()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("alow_custom=true", ("no such config group or key", "did you mean allow_custom?")),
        ("allow_custom=perhaps", ("allow_custom=perhaps", "true or false")),
        ("allow_custom=[true]", ("true or false",)),
        ("allow_custom=null", ("true or false",)),
        ("allow_custom=", ("true or false",)),
        ("allow_custom.x=1", ("true or false",)),
        ("allow_custom=???", ("a value is needed",)),
        ("~allow_custom", ("cannot go away",)),
        ("allow_custom@x=true", ("no package",)),
        ("allow_custom=true,false", ("several values",)),
    ],
)
def test_refused_in_one_line(override, words):
    with pytest.raises(ConfigError) as refusal:
        compose([override])
    assert_one_line(str(refusal.value), *words)


@dataclass(frozen=True)
class Nested:
    """depth: how deep."""

    depth: int = 1


@dataclass(frozen=True)
class Nesting:
    """inner: keys of its own."""

    plain: bool = False
    inner: Nested = field(default_factory=Nested)


@pytest.fixture
def nesting(monkeypatch):
    for name in ("Nested", "Nesting"):
        monkeypatch.setattr(root_module, name, globals()[name], raising=False)
    monkeypatch.setattr(root_module, "Root", Nesting)


def test_a_key_may_hold_keys_of_its_own(nesting):
    assert list(root_leaves(Nesting)) == ["plain", "inner.depth"]
    assert build_root({"plain": True, "inner": {"depth": 3}}) == Nesting(True, Nested(3))
    assert build_root({}) == Nesting()


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (3, ("inner=3", "keys of its own", "inner.depth")),
        ({"dept": 3}, ("inner.dept", "did you mean depth?")),
        ({"depth": "x"}, ("inner.depth=x", "a whole number")),
    ],
)
def test_nested_keys_are_checked_too(nesting, inner, words):
    with pytest.raises(ConfigError) as refusal:
        build_root({"inner": inner})
    assert_one_line(str(refusal.value), *words)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_own_module.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_own_module", None)


def test_a_class_of_ones_own_is_refused_unimported(own_module):
    for words in ((), ("allow_custom=false",)):
        refused = residency("validate", TARGET, *words)
        assert_refused(refused, "my_own_module.MyPolicy", "allow_custom=true")
    assert "my_own_module" not in sys.modules


def test_a_class_of_ones_own_has_its_own_keys_and_defaults(own_module):
    config = compose(["allow_custom=true", TARGET, "cache.boost=3"])
    cache = config.policies.cache
    assert type(cache).__module__ == "my_own_module"
    assert (cache.config.boost, cache.config.slots) == (3, "50%"), "not the slots of cache=lrfu"
    assert config.tree["cache"]["slots"] == "50%"
    assert_refused(
        residency("validate", "allow_custom=true", TARGET, "cache.bost=3"), "did you mean boost?"
    )


def test_a_class_of_ones_own_runs(own_module, tmp_path):
    words = ("device=cpu", "workload.max_new_tokens=2", "allow_custom=true", TARGET)
    result = residency("run", "x", *words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    again = residency("run", "--config", tmp_path / "out" / "config.yaml", "--cfg")
    assert again.stdout == (tmp_path / "out" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os.path", ("not a part of residency",)),
        ("os", ("MODULE.CLASS",)),
        ("..x", ("MODULE.CLASS",)),
        ("not_there.Policy", ("cannot be imported", "not_there", "PYTHONPATH=.")),
        ("residency.policies.prefill.demand.Demand", ("a choice of prefill",)),
    ],
)
def test_what_is_no_part_of_the_group_is_refused_even_so(target, words):
    with pytest.raises(ConfigError) as refusal:
        compose(["allow_custom=true", f"cache._target_='{target}'"])
    assert_one_line(str(refusal.value), f"cache._target_={target}", *words)


def test_options_are_ours_whatever_is_allowed():
    assert part_class("cache", option_node("cache", "lru")["_target_"], custom=True).group
