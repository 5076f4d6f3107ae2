"""Composition: every option builds, what is wrong is refused in one helpful line."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from command import assert_one_line
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from residency.conf import Config, compose
from residency.conf.build import build_part, part_class
from residency.conf.options import GROUPS, PRESETS, option_names, option_node
from residency.conf.root import ROOT_KEYS
from residency.policies.errors import ConfigError

OPTIONS = [(group, name) for group in GROUPS for name in option_names(group)]
CACHES = ", ".join(option_names("cache"))
NEEDED = {"folder": ["model.path=/some/where"]}


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes_and_builds(group, name):
    config = compose([f"{group}={name}", *NEEDED.get(name, [])])
    assert config.parts[group].name == name
    assert config.parts[group].group == group


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_yaml_states_exactly_the_defaults_of_its_class(group, name):
    node = option_node(group, name)
    cls = part_class(group, node.pop("_target_"))
    assert typed(node) == typed({f.name: default(f) for f in dataclasses.fields(cls.Config)})


def default(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def typed(node):
    return {key: (type(value), value) for key, value in node.items()}


@pytest.mark.parametrize("name", option_names(PRESETS))
def test_every_preset_composes_without_conflict(name):
    assert list(compose([f"{PRESETS}={name}"]).conflicts()) == []


def test_no_preset_is_the_default_and_can_be_asked_for():
    for override in (f"{PRESETS}=null", f"~{PRESETS}"):
        assert compose([override]) == compose()


def compare_parts(first, second):
    assert first.tree == second.tree
    for group, part in first.parts.items():
        assert type(part) is type(second.parts[group])
        assert part.config == second.parts[group].config


@pytest.fixture(autouse=True)
def _equal_configs(monkeypatch):
    """Parts compare by class and config here; in the project they are compared by identity."""
    monkeypatch.setattr(Config, "__eq__", lambda a, b: compare_parts(a, b) is None)


def test_composing_twice_gives_the_same():
    overrides = ["cache=lru", "cache.slots=7", "prefill=hit_d2d", "workload.stop_tokens=[1,2]"]
    assert compose(overrides) == compose(overrides)
    with pytest.raises(AssertionError):
        assert compose(overrides) == compose()


def test_composing_leaves_nothing_behind():
    compose(["decode=cpu", "workload.stop_tokens=[1]"])
    assert compose().tree["cache"]["decay"] == 0.1
    assert compose().workload.config.stop_tokens == []


def test_threads_may_compose_at_once():
    slots = list(range(1, 13))
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(lambda n: compose(["cache=lru", f"cache.slots={n}"]), slots))
    assert [config.policies.cache.config.slots for config in configs] == slots


def test_decode_cpu_brings_what_goes_with_it():
    config = compose(["decode=cpu"])
    assert config.policies.cache.name == "none"
    assert config.policies.prefill.name == "always_stream"
    assert list(config.conflicts()) == []


@pytest.mark.parametrize("order", [1, -1])
def test_an_explicit_choice_wins_over_what_decode_cpu_brings(order):
    config = compose(["decode=cpu", "cache=lru", "prefill=demand"][::order])
    assert config.policies.cache.name == "lru"
    assert config.policies.prefill.name == "demand"


REFUSED = [
    # unknown groups and options
    (["cache=lrff"], CACHES, "did you mean lrfu?"),
    (["cache=LRU"], "did you mean lru?"),
    (["cahce=lru"], ", ".join(GROUPS), "did you mean cache?"),
    (["experiment=nothing_stay"], "everything_resident", "did you mean nothing_stays?"),
    (["foo.bar=1"], ", ".join(GROUPS)),
    (["+foo=1"], ", ".join(GROUPS)),
    (["++foo.bar=1"], ", ".join(GROUPS)),
    (
        ["prefill.otherwise=hit_d2b"],
        "always_stream, auto, demand, hit_d2d",
        "did you mean hit_d2d?",
    ),
    (["prefill.otherwise=demand"], "cannot name itself", "always_stream, auto, hit_d2d"),
    # unknown keys, forced or not
    (["cache.slot=3"], "cache=lrfu has no such key", "slots, scope", "did you mean slots?"),
    (["+cache.slot=3"], "did you mean slots?"),
    (["++cache.slot=3"], "did you mean slots?"),
    (["cache=lru", "cache.decay=0.5"], "cache=lru has no such key", "slots"),
    (["cache=none", "cache.slots=3"], "it has no keys"),
    (["cache=none", "cache.prefill_tokens=0"], "it has no keys"),
    (["experiment.slots=3"], "a preset has no keys", "nothing_stays"),
    # values
    (["cache.slots=1.5"], "cache.slots=1.5", "a whole number or text"),
    (["cache.slots=[1]"], "a whole number or text"),
    (["cache.slots={a:1}"], "a whole number or text"),
    (["cache.slots.x=1"], "a whole number or text"),
    (["cache.slots=true"], "a whole number or text"),
    (["cache.slots=null"], "a whole number or text"),
    (["cache.decay=hello"], "cache.decay=hello", "a number"),
    (["cache.prefill_tokens=1.5"], "cache.prefill_tokens=1.5", "a whole number or text"),
    (["cache.prefill_weight=light"], "cache.prefill_weight=light", "a number"),
    (["prefill.groups=1.5"], "a whole number"),
    (["workload.ignore_eos=perhaps"], "true or false"),
    (["workload.stop_tokens=5"], "a list of whole numbers"),
    (["workload.stop_tokens=[a]"], "a list of whole numbers"),
    (["workload.stop_tokens=[1,null]"], "a list of whole numbers"),
    (["model=folder"], "model.path", "a value is needed"),
    (["cache.slots=???"], "cache.slots", "a value is needed"),
    (["cache=lru,lrfu"], "several values", "give one"),
    (["cache.slots=range(1,3)"], "several values"),
    (["workload.prompt=${nothing}"], "workload.prompt", "'nothing' not found"),
    # deletions and forced choices
    (["~cache"], "needs one cache", CACHES),
    (["~cache=lrfu"], "needs one cache", CACHES),
    (["cache=null"], "needs one cache", CACHES),
    (["cache="], CACHES),
    (["~cache.slots"], "cache.slots=..."),
    (["+cache=lru"], "cache=NAME", CACHES),
    (["++cache=lru"], "cache=NAME", CACHES),
    (["+experiment=nothing_stays"], "experiment=NAME", "everything_resident"),
    (["cache@other=lru"], "cache=NAME", CACHES),
    (["cache=[lru,lrfu]"], CACHES),
    (["cache=../cache/lru"], CACHES),
    # classes
    (["cache._target_=os.system"], "only classes of residency", "cache=NAME"),
    (["cache._target_=null"], "only classes of residency"),
    (["cache._target_=residency.policies.cache.lru.Foo"], "cannot be imported"),
    (["cache._target_=residency"], "cannot be imported"),
    (["cache._target_=residency.cli.run"], "not a part of residency"),
    (["cache._target_=residency.policies.prefill.demand.Demand"], "a choice of prefill"),
    (["cache._target_=residency.policies.cache.base.CachePolicy"], "only an interface"),
    # Hydra's own settings, and what is no override at all
    (["hydra.run.dir=/tmp"], "none of its own settings"),
    (["hydra/launcher=basic"], "none of its own settings"),
    (["hydra.searchpath=[pkg://os]"], "none of its own settings"),
    (["cache"], "key=value"),
    ([""], "key=value"),
    (["cache = lru"], "key=value"),
    (["workload.prompt=a=b"], "key=value", "quote"),
    (['workload.prompt="unclosed'], "key=value", "quote"),
    (["cache=l\nru"], "cache=l"),
    (["cache='l\nru'"], "cache=l ru", CACHES),
    (["cache._target_='os\nsystem'"], "only classes of residency"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case[0]))
def test_refused_in_one_helpful_line(case):
    overrides, *words = case
    with pytest.raises(ConfigError) as refusal:
        compose(overrides)
    assert_one_line(str(refusal.value), *words)


PROMPTS = (
    'say "hi"',
    "it's",
    "back\\slash \\",
    "${model.path}",
    "\\${x} \\\\${y}",
    "$ {a: 1} [b] #c",
    "a=b ~c +d",
    "Größe 日本 🙂",
    "line\nbreak\r\n\ttab ",
    "next\x85line\u2028\u2029\x80\x7f and 😀 \\u0085",
    "null",
    "12",
    "",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_taken_literally_and_reads_back(prompt):
    config = compose(prompt=prompt)
    assert config.workload.config.prompt == prompt
    assert read_back(config) == config.tree
    workload = build_part("workload", read_back(config)["workload"])
    assert workload.config == config.workload.config


@given(prompt=st.text() | st.text("$\\{}a' :#"))
def test_any_text_reads_back_from_the_yaml(prompt):
    assume(prompt != "???")  # means "missing" to OmegaConf, however it is quoted
    config = Config({}, {"workload": {"prompt": prompt}})
    assert read_back(config) == config.tree


def read_back(config):
    return OmegaConf.to_container(OmegaConf.create(config.yaml()), resolve=True)


def test_an_escaped_interpolation_in_an_override_is_plain_text():
    config = compose([r"workload.prompt='\${x} costs'"])
    assert config.workload.config.prompt == "${x} costs"


def test_an_interpolation_in_an_override_is_resolved():
    assert compose(["cache.slots=${prefill.groups}"]).policies.cache.config.slots == 8


def test_the_yaml_names_every_key_of_every_group():
    config = compose(["cache=lru", "cache.slots=7"])
    tree = read_back(config)
    assert list(tree) == [*GROUPS, *ROOT_KEYS]
    for group, part in config.parts.items():
        assert set(tree[group]) == {"_target_", *dataclasses.asdict(part.config)}
