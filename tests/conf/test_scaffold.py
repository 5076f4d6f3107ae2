"""`residency policies new`: what it writes is an option like any other, and keeps its contract."""

import importlib.util
import json
import subprocess
import sys

import pytest
from command import assert_refused, residency
from made_traces import made_trace

from residency.conf.options import look_again, option_names
from residency.conf.scaffold import KINDS, package_files
from residency.runtime.traces.writing import save

SHORT = ("device=cpu", "workload.max_new_tokens=4", "--json")
NAMES = {"cache": "tally", "prefill": "eager_reader", "decode": "halves"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A package of each kind, by the command."""
    folder = tmp_path_factory.mktemp("packages")
    for group, name in NAMES.items():
        result = residency("policies", "new", name, "--kind", group, "--folder", folder / name)
        assert result.exit_code == 0, result.output
        assert f"pip install -e {folder / name}" in result.stdout
        assert {str(file) for file in (folder / name).rglob("*") if file.is_file()} == set(
            result.stdout.splitlines()[:-1]
        )
    return folder


@pytest.fixture(scope="module")
def site(written):
    """Where pip has installed them."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    folders = [str(written / name) for name in NAMES.values()]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", "site", *folders],
        capture_output=True,
        text=True,
        cwd=written,
    )
    assert done.returncode == 0, done.stderr
    return written / "site"


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    look_again()
    yield site
    look_again()
    for name in [name for name in sys.modules if name.startswith("residency_")]:
        del sys.modules[name]


def test_each_is_listed_shown_and_judged(installed):
    cells = json.loads(residency("validate", "--matrix", "--json").stdout)
    for group, name in NAMES.items():
        assert name in option_names(group)
        (shown,) = json.loads(residency("policies", name, "--json").stdout)
        assert shown["group"] == group and shown["parameters"]
        assert all(one["meaning"] for one in shown["parameters"]), "a key without its meaning"
        assert residency("validate", f"{group}={name}").exit_code == 0
        assert any(cell["choices"][group] == name and not cell["conflicts"] for cell in cells)


@pytest.mark.parametrize("group", NAMES)
def test_each_runs(installed, group):
    result = residency("run", "ROMEO:", f"{group}={NAMES[group]}", "cache.slots=8%", *SHORT)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["new_tokens"] == 4


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cache=tally cache.cap=0", "cache.cap=0"),
        ("prefill=eager_reader prefill.max_tokens=-1", "prefill.max_tokens=-1"),
        ("decode=halves decode.share=2", "decode.share=2.0"),
    ],
)
def test_their_own_faults_are_told(installed, override, key):
    result = residency("validate", *override.split())
    assert result.exit_code == 2 and key in result.stdout


def test_the_cache_is_swept(installed, tmp_path):
    file = tmp_path / "routes.safetensors"
    save(made_trace(0), file, "--routes")
    result = residency("replay", f"trace={file}", "cache=tally,lru", "slots=25%,50%", "--json")
    assert result.exit_code == 0, result.output
    names = [curve["name"] for curve in json.loads(result.stdout)["policies"]]
    assert names == ["tally", "lru"]


@pytest.mark.parametrize("group", NAMES)
def test_its_own_tests_pass(written, installed, group):
    """As pytest would find them; docs/tutorial.md has pytest itself do it."""
    name = NAMES[group]
    spec = importlib.util.spec_from_file_location("own", written / name / f"tests/test_{name}.py")
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    (case,) = [cls for key, cls in vars(own).items() if key.startswith("Test")]
    tests = [test for test in dir(case) if test.startswith("test_")]
    assert len(tests) > 2
    for test in tests:
        getattr(case(), test)()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("lrfu", "--kind", "cache"), ("lrfu", "cache=lrfu already")),
        (("gpu", "--kind", "cache"), ("gpu", "decode=gpu already")),
        (("2fast", "--kind", "cache"), ("2fast", "Python name")),
        (("a-b", "--kind", "cache"), ("a-b", "Python name")),
        (("../a", "--kind", "cache"), ("../a", "Python name")),
        (("class", "--kind", "cache"), ("class", "Python name")),
        (("new", "--kind", "cache"), ("new", "means something else")),
        (("conf", "--kind", "cache"), ("conf", "means something else")),
        (("fine", "--kind", "model"), ("--kind model", "cache, prefill, decode")),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(residency("policies", "new", *args), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_stays_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir()
    args = ("policies", "new", "mine", "--kind", "cache", "--folder", tmp_path / "mine")
    assert_refused(residency(*args), "mine", "is there already")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_package_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("residency.conf.scaffold.os.rename", full)
    args = ("policies", "new", "mine", "--kind", "cache", "--folder", tmp_path / "mine")
    assert_refused(residency(*args), "mine", "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", KINDS)
def test_no_placeholder_is_left(group):
    for path, text in package_files("some_name", group).items():
        assert "$" not in path + text
        if path.endswith(".py"):
            compile(text, path, "exec")
