"""A third party's package brings a cache policy: found, listed, validated, composed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from command import assert_one_line, assert_refused, residency
from made_traces import made_trace

from residency.conf.options import look_again, option_names
from residency.runtime.traces.writing import save

POLICY = '''"""mine: as lru, with a boost."""

from dataclasses import dataclass

from residency.policies.cache.lru import Lru


class MyPolicy(Lru):
    """Nothing of its own."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Lru.Config):
        """boost: how much."""

        boost: int = 1
'''
YAML = "_target_: my_policies.mine.MyPolicy\nslots: 25%\nboost: 1\n"
PYPROJECT = '[project]\nname = "my-policies"\nversion = "1"\n'
ENTRY_POINT = '[project.entry-points."residency.conf"]\nmine = "my_policies.conf"\n'
METADATA = "Metadata-Version: 2.1\nName: my-policies\nVersion: 1\n"
ENTRY_POINTS = "[residency.conf]\nmine = my_policies.conf\n"
HOST = ("decode=cpu", "prefill=always_stream")
CLI = "from residency.cli import main; main()"


def write(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def site(tmp_path):
    """A folder as pip leaves it: the package, and the metadata that its pyproject declares."""
    write(
        tmp_path,
        {
            "pyproject.toml": PYPROJECT + ENTRY_POINT,
            "my_policies/__init__.py": "",
            "my_policies/mine.py": POLICY,
            "my_policies/conf/__init__.py": "",
            "my_policies/conf/cache/mine.yaml": YAML,
            "my_policies-1.dist-info/METADATA": METADATA,
            "my_policies-1.dist-info/entry_points.txt": ENTRY_POINTS,
        },
    )
    return tmp_path


def python(site, code, *args):
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env
    )


IN_A_PROCESS = """
import json
from typer.testing import CliRunner
from residency.cli import app
from residency.conf import compose

calls = (["policies", "--json"], ["validate", "cache=mine", "cache.boost=2"])
results = [CliRunner().invoke(app, args) for args in calls]
cache = compose(["cache=mine", "cache.boost=3", "cache.prefill_tokens=5"]).policies.cache
told = [(result.exit_code, result.stdout) for result in results]
print(json.dumps([*told, (type(cache).__module__, cache.config.boost, cache.promoted(9, 0))]))
"""


def test_an_installed_policy_is_listed_valid_and_composed(site):
    listed, valid, built = json.loads(python(site, IN_A_PROCESS).stdout)
    options = {o["name"]: o for o in json.loads(listed[1]) if o["group"] == "cache"}
    assert set(options) == {"mine", *option_names("cache")}
    assert options["mine"]["summary"] == "as lru, with a boost."
    assert [p["key"] for p in options["mine"]["parameters"]][:1] == ["slots"]
    assert [p["key"] for p in options["mine"]["parameters"]][-1:] == ["boost"]
    assert valid == [0, "valid: nothing conflicts\n"]
    assert built == ["my_policies.mine", 3, 5], "a key of every policy, though not in its YAML"


def test_a_plugin_that_is_gone_is_one_clear_line(site):
    write(
        site, {"my_policies-1.dist-info/entry_points.txt": "[residency.conf]\nmine = gone.conf\n"}
    )
    done = python(site, CLI, "policies")
    assert done.returncode == 2
    assert_one_line(done.stderr, "plugin mine", "gone.conf is not installed")


@pytest.fixture
def installed(site, monkeypatch):
    """The same package in this process."""
    monkeypatch.syspath_prepend(str(site))
    look_again()
    yield site
    look_again()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_policies"]:
        del sys.modules[name]


def test_its_needs_and_keys_are_checked_as_our_own(installed):
    assert residency("validate", "cache=mine").exit_code == 0
    assert_refused(residency("run", "cache=mine", *HOST), "cache=mine with decode=cpu")
    assert_refused(residency("validate", "cache=mine", "cache.bost=2"), "did you mean boost?")


def test_a_plugin_without_its_config_package_is_one_clear_line(installed):
    shutil.rmtree(installed / "my_policies" / "conf")
    result = residency("policies")
    assert_refused(result, "plugin mine", "my_policies.conf is not installed")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"my_policies/mine.py": "import not_there\n"}, ("cannot be imported", "not_there")),
        ({"my_policies/mine.py": "def oops(:\n"}, ("cannot be imported", "SyntaxError")),
        ({"my_policies/mine.py": "1 / 0\n"}, ("cannot be imported", "division by zero")),
        ({"my_policies/conf/cache/mine.yaml": "a: [\n"}, ("mine.yaml",)),
        ({"my_policies/conf/cache/mine.yaml": "slots: 3\n"}, ("cache._target_=None",)),
        ({"my_policies/conf/cache/mine.yaml": YAML + "bost: 1\n"}, ("cache.bost", "boost?")),
        (
            {"my_policies/conf/cache/mine.yaml": "defaults: [gone]\n" + YAML},
            ("Could not", "cache/gone"),
        ),
    ],
)
@pytest.mark.parametrize("command", [("validate", "cache=mine"), ("policies", "mine")])
def test_a_broken_policy_is_one_clear_line(installed, files, words, command):
    write(installed, files)
    if command[0] == "policies" and "cache.bost" in words:
        pytest.skip("the key is judged when the policy is built")
    assert_refused(residency(*command), *words)


@pytest.mark.parametrize(
    ("touch", "words"),
    [
        ("if step.token > 3: self.keys[ids] = 1", ("on the host", "no .item()")),
        ("raise ValueError('oops')", ("ValueError: oops", "updates keys and state in place")),
        ("self.keys = self.keys + 1", ("puts other keys", "updated in place")),
    ],
)
def test_a_policy_that_breaks_the_contract_is_stopped_in_one_line(
    installed, tmp_path, touch, words
):
    own = f"\n    def touch(self, ids, step):\n        {touch}\n"
    write(installed, {"my_policies/mine.py": POLICY + own})
    result = residency("run", "x", "cache=mine", "device=cpu")
    assert_refused(result, "cache=mine: touch", "the rule: ", *words)
    save(made_trace(0), tmp_path / "routes.safetensors", "--routes")
    result = residency("replay", f"trace={tmp_path}/routes.safetensors", "cache=mine", "slots=4")
    assert_refused(result, "cache=mine: touch", "the rule: ", *words)
