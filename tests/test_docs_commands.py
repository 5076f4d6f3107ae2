"""The command lines that the documents show: they parse, and what is cheap is run."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from command import residency

from residency.cli import app
from residency.commands.panels import PANELS
from residency.conf.options import GROUPS, PRESETS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(residency [^`]+)`")
OWN = {"cache=tally", "cache=count", "cache.credit", "cache.cap"}  # of policies the reader writes
OF_REPLAY = {"trace", "slots", "fit", "report"}
OF_ROOT = set(yaml.safe_load((ROOT / "conf/config.yaml").read_text())) - {"defaults"}
COMPOSING = {"run", "bench", "validate", "inspect", "record", "replay", "tune"}
SHORT = {"run": ["workload.max_new_tokens=4"]}  # so that it is cheap
COMMAND = typer.main.get_command(app)


def command_lines(page):
    """Every `residency ...` of a page, in blocks and in running text."""
    text = page.read_text()
    blocks = [block for language, block in FENCE.findall(text) if language in ("sh", "console", "")]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if line.removeprefix("$ ").startswith("residency "):
                yield line.removeprefix("$ ")
    for line in INLINE.findall(FENCE.sub("", text)):
        yield " ".join(line.split())


LINES = sorted({line for page in PAGES for line in command_lines(page)})


def keys_of(group):
    return {
        key
        for file in (ROOT / "conf" / group).glob("*.yaml")
        for key in yaml.safe_load(file.read_text())
    }


def options_of(command):
    return [param for param in command.params if param.param_type_name == "option"]


def check_override(word):
    """A group with an option of it, or a key that one of its options has."""
    name, _, value = word.partition("=")
    group, _, key = name.partition(".")
    if {word, name, group} & (OWN | OF_REPLAY | OF_ROOT):
        return
    assert group in (*GROUPS, PRESETS), word
    if key:
        assert key in keys_of(group) or (group == "cache" and key == "KEY"), word
        return
    for option in value.split(","):
        known = f"{group}={option}" in OWN or (ROOT / "conf" / group / f"{option}.yaml").exists()
        assert known or value in ("NAME", "lruu"), word


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_that_is_shown_parses(line):
    """Its options are there and so are its groups, options and keys; values are not judged."""
    words = shlex.split(line.replace("cache|prefill|decode", "cache"), comments=True)[1:]
    command, name = COMMAND, "residency"
    while words and words[0] in getattr(command, "commands", {}):
        name = words.pop(0)
        command = command.commands[name]
    own = {"--help"} | {opt for param in COMMAND.params for opt in param.opts}
    assert command is not COMMAND or set(words) <= own, f"no command {words[0]}"
    if not words or words == ["--help"] or command is COMMAND or hasattr(command, "commands"):
        return
    if any(words[-1] in param.opts and not param.is_flag for param in options_of(command)):
        words.append("VALUE")  # an option that is only spoken of
    context = command.make_context(name, list(words))
    for value in context.params.values():
        for word in value if isinstance(value, list | tuple) else ():
            if name in COMPOSING and isinstance(word, str) and re.match(r"[\w.]+=", word):
                check_override(word)


def examples():
    """(command line, what is shown of its output) of every console block."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language == "console":
                for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                    line, _, shown = part.partition("\n")
                    yield line, shown


def told(output):
    """What does not change from run to run: the labels of tables' rows, and refusals in full."""
    rows = {line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")}
    refusals = {line for line in output.splitlines() if line.startswith(("error:", "conflict:"))}
    return rows | refusals


EXAMPLES = list(examples())


@pytest.mark.parametrize(("line", "shown"), EXAMPLES, ids=[line for line, _ in EXAMPLES])
def test_what_a_command_is_shown_to_print_is_printed(line, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, command, *words = shlex.split(line)
    result = residency(command, *words, *SHORT.get(command, []))
    assert told(shown) <= told(result.output)
    assert result.exit_code == (2 if shown.startswith(("error:", "conflict:")) else 0)
    assert told(shown)


def test_every_command_is_under_a_heading():
    listed = {name for names in PANELS.values() for name in names}
    assert set(COMMAND.commands) <= listed
    shown = residency("--help").stdout
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
