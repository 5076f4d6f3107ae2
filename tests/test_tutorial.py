"""docs/tutorial.md is run, block by block."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import residency

from residency.conf.options import look_again

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = re.findall(r"`(tally/[\w./]+)`:\n\n```", PAGE)
PIP = ("-q", "--no-index", "--disable-pip-version-check", "--target", "site")


class Reader:
    """Does what the page says, in a folder of its own beside the data of the checkout."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "tests").symlink_to(ROOT / "tests")
        self.paths = [str(folder / "tally"), str(folder / "site")]
        paths = [*self.paths, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.said = {}

    def python(self, *args):
        done = subprocess.run(
            [sys.executable, *args], cwd=self.folder, env=self.env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shell(self, line):
        command, *args = shlex.split(line)
        if command == "residency":
            extra = ["--json"] if args[0] in ("replay", "run") else []
            result = residency(*args, *extra)
            assert result.exit_code == 0, result.output
            self.said[args[0]] = result.stdout
        elif command == "pip":  # into a folder of its own; the source, found first, stays editable
            args.remove("--editable")
            self.python("-m", "pip", *args[:-1], *PIP, f"./{args[-1]}")
            importlib.invalidate_caches()
            look_again()
        else:
            self.said[command] = self.python("-m", command, "-p", "no:cacheprovider", *args)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    reader, files = Reader(tmp_path_factory.mktemp("reader")), iter(FILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(reader.folder)
        for path in reversed(reader.paths):
            patch.syspath_prepend(path)
        read(reader, files)
    look_again()
    for name in [name for name in sys.modules if name.startswith("residency_tally")]:
        del sys.modules[name]
    assert next(files, None) is None
    return reader


def read(reader, files):
    for language, text in BLOCKS:
        if language == "sh":
            for line in text.splitlines():
                reader.shell(line)
        elif language == "yaml" or text.startswith('"""'):
            (reader.folder / next(files)).write_text(text)
            for name in [name for name in sys.modules if name.startswith("residency_tally")]:
                del sys.modules[name]  # a new process would read it anew
            look_again()
        else:
            exec(text, {})


def test_the_contract_is_kept(reader):
    assert " passed" in reader.said["pytest"]


def test_the_policy_is_valid_and_runs(reader):
    assert reader.said["validate"] == "valid: nothing conflicts\n"
    assert json.loads(reader.said["run"])["new_tokens"] == 16


def test_the_page_s_figures_are_the_replay_s(reader):
    result = json.loads(reader.said["replay"])
    curves = result["policies"] + result["bounds"]
    found = {curve["name"]: f"{curve['points'][0]['miss_ratio']:.2%}" for curve in curves}
    told = dict(re.findall(r"^\| `([^`]+)`[^|]*\| ([\d.]+%) \|$", PAGE, re.MULTILINE))
    assert told.items() <= found.items()
    assert len(told) == 4
