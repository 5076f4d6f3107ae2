"""Completion: what each shell is offered, asked as the shells ask."""

import json
import os
import subprocess
import sys

import pytest

from residency.commands import completion
from residency.conf.options import GROUPS, PRESETS, option_names, option_node
from residency.conf.root import ROOT_KEYS, root_leaves

CLI = """
import sys
sys.argv[0] = "residency"
from residency.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, "hydra" in sys.modules, file=sys.stderr)
"""


def asked(shell, env):
    env = os.environ | {"_RESIDENCY_COMPLETE": f"complete_{shell}"} | env
    done = subprocess.run([sys.executable, "-c", CLI], capture_output=True, text=True, env=env)
    assert done.stderr == "False False\n", "completion imports what is heavy"
    return done.stdout


def bash(*words):
    """What bash is offered for the last of these words, which it has cut at "="."""
    env = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    return asked("bash", env).split()


def zsh(line):
    return asked("zsh", {"_TYPER_COMPLETE_ARGS": line})


def test_bash_completes_subcommands_options_and_overrides():
    assert "run" in bash("residency", "r")
    assert {"--config", "--cfg"} == set(bash("residency", "run", "--c"))
    assert bash("residency", "run", "ca") == ["cache=", "cache."]
    starts = [name for name in option_names("cache") if name.startswith("l")]
    assert bash("residency", "run", "cache", "=", "l") == starts
    assert bash("residency", "validate", "cache", "=") == option_names("cache")
    keys = [f"cache.{key}=" for key in option_node("cache", "lru") if key != "_target_"]
    assert bash("residency", "bench", "cache", "=", "lru", "cache.") == keys


def test_zsh_completes_whole_words():
    assert '"cache=lru"' in zsh("residency run cache=l")
    assert '"cache.slots="' in zsh("residency run cache=lru cache.sl")


class Context:
    def __init__(self, *words):
        self.params = {"overrides": words, "cfg": False}


def offered(*words):
    *before, incomplete = words
    return completion.complete_overrides(Context(*before), incomplete)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("exper",), [f"experiment={name}" for name in option_names(PRESETS)]),
        (("experiment=",), [f"experiment={name}" for name in option_names(PRESETS)]),
        (("experiment", "=", "every"), ["everything_resident"]),
        (("cache.sl",), ["cache.slots=", "cache.slots=25%"]),
        (("cache.slots", ""), ["25%"]),
        (("workload.ig",), [f"workload.ignore_eos={t}" for t in ("", "true", "false")]),
        (("prof",), ["profile=true", "profile=false"]),
        (("profile=t",), ["profile=true"]),
        (("cache=lrfu", "cache=none", "cache."), []),
        (("cache=lrfu,l",), [f"cache=lrfu,{n}" for n in option_names("cache") if n[0] == "l"]),
        (("ROMEO:", "dev"), ["device=", "device."]),
        (("nothing",), []),
        (("cache=nothing", "cache."), []),
        (("workload.prompt=",), []),
    ],
)
def test_offers(words, expected):
    found = offered(*words)
    assert [each for each in found if each != words[-1]] == expected


@pytest.mark.parametrize("group", [*GROUPS, PRESETS])
def test_the_options_are_those_that_hydra_finds(group):
    assert sorted(completion._options(group)) == option_names(group)


def test_the_keys_are_those_of_the_config():
    for name in option_names("prefill"):
        keys = [f"prefill.{key}=" for key in option_node("prefill", name) if key != "_target_"]
        assert offered(f"prefill={name}", "prefill.") == keys
    assert set(completion._root()) == set(ROOT_KEYS)
    leaves = {leaf for key in ROOT_KEYS for leaf in completion._keys(key, [])}
    assert leaves == set(root_leaves())
    assert list(completion._choices()) == list(GROUPS)


def test_inspect_is_offered_models_and_what_sizes_depend_on():
    found = completion.complete_inspected(Context(), "")
    assert {*option_names("model"), "model=", "prefill."} <= set(found)
    assert completion.complete_inspected(Context(), "cache") == []


def test_a_plugin_s_options_are_offered_and_its_code_left_alone(tmp_path, monkeypatch):
    files = {
        "own_policies/__init__.py": "raise AssertionError('imported')",
        "own_policies/conf/cache/mine.yaml": "slots: 3\nboost: 1\n",
        "own_policies-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: own\nVersion: 1\n",
        "own_policies-1.dist-info/entry_points.txt": "[residency.conf]\nm = own_policies.conf\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert offered("cache=m") == ["cache=mine"]
    assert offered("cache=mine", "cache.b") == ["cache.boost=", "cache.boost=1"]
    assert "own_policies" not in sys.modules


def test_a_broken_file_offers_nothing(tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("a: [")
    assert completion._read(tmp_path / "broken.yaml") == {}
    assert json.dumps(completion._read(tmp_path / "gone.yaml")) == "{}"
