"""The command line, end to end on the demo model, and its surface, which is frozen."""

import json

import pytest
import typer
from command import assert_refused, residency
from omegaconf import OmegaConf

from residency.cli import app
from residency.conf import compose
from residency.conf.catalog import MATRIX_GROUPS
from residency.conf.options import option_names

SHORT = ("device=cpu", "workload.max_new_tokens=8", "workload.temperature=0")
SURFACE = {
    "run": {
        *("overrides", "--prompt", "-p", "--prompt-file", "-f", "--cfg", "--out", "--force"),
        "--json",
        "--config",
        "--routes",
        "--save-state",
    },
    "bench": {"overrides", "--config", "--cfg", "--out", "--force", "--json"},
    "inspect": {"model", "--config", "--json"},
    "validate": {"overrides", "--config", "--matrix", "--json"},
    "policies show": {"name", "--json"},
    "policies new": {"name", "--kind", "--folder"},
    "chat": {"overrides", "--system", "--cfg"},
    "replay": {"words", "--out", "--force", "--json"},
    "report": {"folders", "--against", "--out", "--force", "--json"},
    "sweep": {
        *("overrides", "--out", "--resume", "--strict", "--dry-run", "--no-routes", "--json"),
    },
    "tune": {"words", "--out", "--force", "--json"},
    "doctor": {"overrides", "--quick", "--out", "--force", "--json"},
    "plan": {
        *("words", "--gpu-memory", "--host-memory", "--measured", "--machine", "--out"),
        *("--force", "--json"),
    },
    "trace record": {
        *("file", "overrides", "--prompt", "-p", "--prompt-file", "-f", "--force", "--json"),
    },
    "trace import": {
        *("source", "file", "--domains", "--experts", "--layers", "--top-k", "--prompt-tokens"),
        *("--chunk-tokens", "--admit-tokens", "--force", "--json"),
    },
    "trace info": {"file", "--json"},
}


def surface():
    """Every command with the names of its options and arguments."""
    commands = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            commands[name] = command
        else:
            commands |= {f"{name} {own}": each for own, each in inner.items()}
    return {
        name: {
            text
            for param in command.params
            for text in (param.opts if param.param_type_name == "option" else [param.name])
        }
        - {"--help"}
        for name, command in commands.items()
    }


def test_the_surface_is_frozen():
    assert surface() == SURFACE


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ("run", "validate", "policies", "Mixture-of-Experts")),
        (("run",), ("prompt", "--cfg", "--out", "--force", "--json", "cache=lru")),
        (("bench",), ("prompts of several lengths", "--out", "chart.png", "model.routing=even")),
        (("inspect",), ("headers alone", "MODEL", "--json", "GPU")),
        (("validate",), ("Exit status 2", "--matrix", "decode=gpu", "device=cpu")),
        (("policies",), ("lrfu", "parameters", "refuses", "new")),
        (("policies", "show"), ("lrfu", "parameters", "refuses")),
        (("policies", "new"), ("NAME", "--kind", "cache=count", "pip install")),
        (("chat",), ("/undo", "/retry", "--system", "ctrl-D", "questions.txt")),
        (("replay",), ("trace=FILE", "Belady", "curves.png", "slots", "cache.decay")),
        (("sweep",), ("cache=lru,lrfu", "--resume", "glob", "result.json", "hydra/launcher=NAME")),
        (("tune",), ("trace=FILE", "cache.decay=0.05,0.1,0.2", "slots", "report")),
        (("report",), ("DIR", "--against", "index.html", "data.csv", "within noise", "--force")),
        (("doctor",), ("device=cuda", "--quick", "--out", "hold you back", "pinned")),
        (("plan",), ("MODEL", "--gpu-memory", "24GiB", "--measured", "--machine", "key to change")),
        (("trace",), ("record", "import", "info")),
        (("trace", "record"), ("FILE", "one after the other", "--force", "cache.slots=25%")),
        (("trace", "import"), ("SOURCE", "--prompt-tokens", "--domains", "SGLang")),
        (("trace", "info"), ("stack distances", "skew")),
    ],
)
def test_help_says_what_one_needs(command, words):
    result = residency(*command, "--help")
    assert result.exit_code == 0
    for word in words:
        assert word in result.stdout


def test_no_command_shows_the_help():
    assert "validate" in residency().output


def test_a_run_streams_the_text_and_ends_with_the_costs():
    result = residency("run", "ROMEO:", *SHORT)
    assert result.exit_code == 0
    assert result.stdout.startswith("ROMEO:")
    text = residency("run", "ROMEO:", *SHORT, "--json").stdout
    assert json.loads(text)["text"].strip() in result.stdout
    for word in ("TTFT", "TPOT", "hits", "misses", "evictions", "lookups", "stream bytes", "8 new"):
        assert word in result.stdout


def test_the_report_names_the_device_that_auto_took():
    result = residency("run", "x", "device=auto", *SHORT[1:])
    assert "device=auto took" in result.stdout


def test_json_is_one_object_and_nothing_else():
    result = residency("run", "ROMEO:", *SHORT, "--json")
    report = json.loads(result.stdout)
    assert len(result.stdout.splitlines()) == 1
    assert report["new_tokens"] == 8


def test_out_writes_the_result_and_the_config(tmp_path):
    result = residency(
        "run", "ROMEO:", *SHORT, "cache.slots=16", "--out", tmp_path / "new", "--json"
    )
    written = json.loads((tmp_path / "new" / "result.json").read_text())
    assert written == json.loads(result.stdout)
    tree = OmegaConf.to_container(OmegaConf.load(tmp_path / "new" / "config.yaml"), resolve=True)
    assert tree == compose([*SHORT, "cache.slots=16"], prompt="ROMEO:").tree
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"result.json", "config.yaml"}


def test_cfg_prints_yaml_that_reads_back(tmp_path):
    nasty = 'a "b" \\ ${x} é' + "x" * 200
    result = residency("run", *SHORT, "cache=lru", "--prompt", nasty, "--cfg")
    tree = OmegaConf.to_container(OmegaConf.create(result.stdout), resolve=True)
    assert tree == compose([*SHORT, "cache=lru"], prompt=nasty).tree
    assert tree["workload"]["prompt"] == nasty


def prompt_of(*args, **kwargs):
    result = residency("run", *args, "--cfg", **kwargs)
    assert result.exit_code == 0, result.output
    return OmegaConf.to_container(OmegaConf.create(result.stdout))["workload"]["prompt"]


def test_the_prompt_comes_from_any_one_place(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from = a file\n")
    assert prompt_of("a word", "cache=lru") == "a word"
    assert prompt_of("cache=lru", "--prompt", "an = option") == "an = option"
    assert prompt_of("-p", "~short") == "~short"
    assert prompt_of("-f", file) == "from = a file\n"
    assert prompt_of("-f", "-", input="from stdin\n") == "from stdin\n"
    assert prompt_of("workload.prompt='an override'") == "an override"
    assert prompt_of() == compose().workload.config.prompt


@pytest.mark.parametrize(
    "args",
    [("a", "b"), ("a", "-p", "b"), ("a", "-f", "-"), ("-p", "b", "-f", "-")],
    ids=" ".join,
)
def test_two_prompts_are_refused(args):
    assert_refused(residency("run", *args), "more than one prompt", "key=value")


def test_several_prompts_are_decoded_together(tmp_path):
    args = ("-p", "ROMEO:", "-p", "JULIET: I", *SHORT, "cache.slots=50%")
    report = json.loads(residency("run", *args, "--json").stdout)
    assert report["kind"] == "batch"
    assert [one["new_tokens"] for one in report["sequences"]] == [8, 8]
    shown = residency("run", *args, env={"COLUMNS": "120"}).stdout
    for prompt, one in zip(("ROMEO:", "JULIET: I"), report["sequences"], strict=True):
        alone = residency("run", prompt, *SHORT, "cache.slots=50%", "--json")
        assert json.loads(alone.stdout)["text"] == one["text"]
        assert prompt + one["text"] in shown
    for word in ("2 sequences", "16 new", "tokens/s", "TPOT"):
        assert word in shown


def prompts_of(*args):
    result = residency("run", *args, "--cfg")
    assert result.exit_code == 0, result.output
    config = OmegaConf.to_container(OmegaConf.create(result.stdout), resolve=True)
    return config["workload"]["prompts"]


def test_several_prompts_come_from_options_files_or_lines(tmp_path):
    lines, text = tmp_path / "prompts.jsonl", tmp_path / "text.txt"
    lines.write_text('"one ${x}"\n\n{"prompt": "two\\nlines", "id": 3}\n')
    text.write_text("three\n")
    assert prompts_of("-p", "${a}", "-p", "b") == ["${a}", "b"]
    assert prompts_of("-f", lines) == ["one ${x}", "two\nlines"]
    assert prompts_of("-f", lines, "-f", text) == ["one ${x}", "two\nlines", "three\n"]
    assert prompts_of("workload.prompts=[a,'b c']") == ["a", "b c"]
    assert prompts_of("-p", "alone") == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "line 1: not JSON"),
        ('"a"\n[1]\n', 'line 2: it must be a JSON string, or an object with a "prompt"'),
        ("\n", "there is no prompt in it"),
    ],
)
def test_lines_that_are_no_prompts_are_refused(tmp_path, content, what):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert_refused(residency("run", "-f", file), "prompts.jsonl", what)


def test_what_several_prompts_cannot_do_is_refused(tmp_path):
    two = ("-p", "a", "-p", "b")
    recorded = residency("run", *two, "--routes", tmp_path / "routes.npz")
    assert_refused(recorded, "a recording is of one sequence")
    few = residency("run", *two, "device=cpu", "cache.slots=4")
    assert_refused(few, "a decode step of 2 sequences needs 8 experts", "cache.slots=8")
    both = residency("validate", "workload.prompt=a", "workload.prompts=[b,c]")
    assert both.exit_code == 2 and "workload.prompts" in both.stdout


def test_validate_tells_by_its_exit_status():
    result = residency("validate", *SHORT)
    assert (result.exit_code, result.stdout) == (0, "valid: nothing conflicts\n")
    result = residency("validate", "cache=none")
    assert result.exit_code == 2
    assert result.stdout.startswith("conflict: prefill=demand with cache=none: ")
    assert_refused(residency("validate", "cache=lrff"), "did you mean lrfu?")


def test_validate_in_json():
    result = residency("validate", "--json")
    assert json.loads(result.stdout) == {"valid": True, "conflicts": []}
    result = residency("validate", "cache=none", "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert not told["valid"]
    (conflict,) = told["conflicts"]
    assert conflict["keys"] == ["prefill=demand", "cache=none"]
    assert conflict["mend"] == "cache=lru"


def test_the_matrix_has_every_cell_and_a_reason_in_each_refused_one():
    cells = json.loads(residency("validate", "--matrix", "--json").stdout)
    found = {tuple(cell["choices"][group] for group in MATRIX_GROUPS) for cell in cells}
    expected = {()}
    for group in MATRIX_GROUPS:
        expected = {(*cell, name) for cell in expected for name in option_names(group)}
    assert found == expected
    assert len(cells) == len(expected)
    assert all(c["reason"] and c["mend"] for cell in cells for c in cell["conflicts"])
    on_cpu = [cell for cell in cells if cell["choices"]["device"] == "cpu"]
    for cell in on_cpu[::13]:  # prime to the number of options, so that each of them comes up
        composed = [f"{group}={name}" for group, name in cell["choices"].items()]
        assert bool(cell["conflicts"]) == bool(list(compose(composed).conflicts()))


def test_the_matrix_as_a_table():
    result = residency("validate", "--matrix", env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "works" in result.stdout and "mend it with" in result.stdout
    refused = residency("validate", "--matrix", "cache=lru")
    assert_refused(refused, "cache=lru", "--matrix")


def test_policies_lists_every_one():
    listed = residency("policies", env={"COLUMNS": "200"}).stdout
    for group in ("cache", "prefill", "decode"):
        for name in option_names(group):
            assert name in listed


@pytest.mark.parametrize("name", ["lrfu", "cache/lrfu", "cache=lrfu"])
def test_policies_shows_one_with_its_parameters(name):
    shown = residency("policies", name, env={"COLUMNS": "200"}).stdout
    for word in ("cache=lrfu", "cache.decay", "0.1", "how fast old references fade", "decode=gpu"):
        assert word in shown
    assert "always_stream" not in shown


def test_policies_in_json():
    options = json.loads(residency("policies", "demand", "--json").stdout)
    assert [(o["group"], o["name"]) for o in options] == [("prefill", "demand")]
    assert {p["key"]: p["default"] for p in options[0]["parameters"]}["max_tokens"] == 256
    assert len(options[0]["refuses"]) == 2


@pytest.mark.parametrize(
    ("wrong", "meant"), [("lrff", "lrfu"), ("LRU", "lru"), ("deman", "demand")]
)
def test_an_unknown_policy_names_the_closest(wrong, meant):
    result = residency("policies", wrong)
    assert_refused(result, wrong, "always_stream", f"did you mean {meant}?")


@pytest.mark.parametrize("group", ["cache", "prefill", "decode"])
def test_a_group_lists_its_policies(group):
    listed = residency("policies", group, env={"COLUMNS": "200"})
    assert listed.exit_code == 2
    assert_refused(listed, *option_names(group))


def test_a_run_that_conflicts_names_each_conflict_on_a_line_of_its_own():
    result = residency("run", "workload.max_new_tokens=0", "workload.top_p=2")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "error: workload.top_p",
        "error: workload.max_new_tokens",
    ]
