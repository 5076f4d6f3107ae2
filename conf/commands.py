"""What each command composes: its own workload, for `run` prompts from one place at most, and for
`inspect` a model that is named in one word.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from residency.conf.build import escaped
from residency.conf.compose import Config, compose
from residency.conf.options import PRESETS, option_names, suggestion
from residency.policies.base import Conflict
from residency.policies.errors import ConfigError, WorkloadError

MEASURED = "bench"  # the workload of a measurement that names no other
INSPECTED = ("model", "prefill")  # groups that sizes depend on: staging is the prefill's


def compose_run(overrides: list[str], prompts: list[str], files: list[str]) -> Config:
    """For `run`. A prompt is a bare word among the overrides; or there are `prompts`, one or more;
    or they are read from `files`.
    """
    words = [text for text in overrides if "=" not in text and not text.startswith("~")]
    if len(words) > 1 or sum(map(bool, (words, prompts, files))) > 1:
        given = ", ".join([repr(text) for text in words + prompts] + files)
        raise ConfigError(
            f"more than one prompt: {given}; an override has the form key=value, and several "
            "prompts are each given with -p, or each with -f"
        )
    rest = [text for text in overrides if text not in words]
    texts = words or prompts or [text for file in files for text in _read_prompts(file)]
    return _compose("run", "generate", rest, texts)


def compose_bench(overrides: list[str]) -> Config:
    """For `bench`. Raises ConfigError for what it would make void."""
    config = _compose("bench", MEASURED, overrides, [])
    for fault in measured_faults(config):
        raise ConfigError(str(fault))
    return config


def measured_faults(config: Config) -> Iterator[Conflict]:
    """What a measurement would make void."""
    file = getattr(config.policies.cache.config, "warm_start", "")
    if file and config.workload.command == "bench":
        reason = (
            "`residency bench` empties the slots before what it times, or fills them itself; "
            "leave it out, or take `residency run`"
        )
        yield Conflict((f"cache.warm_start={file}",), reason, "cache.warm_start=''")


def compose_inspect(words: list[str]) -> Config:
    """For `inspect`: a folder, or an option of the group model, or overrides that say either.

    Raises ConfigError for a word that is neither, and for keys that change nothing there.
    """
    overrides = [override for word in words for override in _model_overrides(word)]
    for text in overrides:
        if text.lstrip("+~").partition("=")[0].partition(".")[0] not in INSPECTED:
            reason = f"`residency inspect` depends on {' and '.join(INSPECTED)} alone"
            raise ConfigError(f"{text}: {reason}")
    return compose(overrides)


def _model_overrides(word: str) -> list[str]:
    if "=" in word and not Path(word).expanduser().is_dir():
        return [word]
    names = option_names("model")
    if word in names:
        return [f"model={word}"]
    if not Path(word).expanduser().exists():
        raise ConfigError(f"{word}: no such folder, and no such model; {suggestion(word, names)}")
    path = escaped(word).replace("'", "\\'")
    return ["model=folder", f"model.path='{path}'"]


def _compose(command: str, workload: str, overrides: list[str], prompts: list[str]) -> Config:
    """workload: what the command runs unless overrides, or their preset, choose another."""
    presets = [text for text in overrides if text.startswith(f"{PRESETS}=")]
    if not any(text.startswith("workload=") for text in overrides) and not (
        presets and compose(presets).workload.command == command
    ):
        overrides = [f"workload={workload}", *overrides]
    config = compose(overrides, prompts=prompts)
    if (chosen := config.workload).command != command:
        raise ConfigError(
            f"workload={chosen.name}: `residency {chosen.command}` runs it; choose another for "
            f"`residency {command}`, e.g. workload={workload}"
        )
    return config


def _read_prompts(file: str) -> list[str]:
    """The file's text, or one prompt a line where its name ends in .jsonl."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--prompt-file {file}: cannot be read ({error})") from error
    if not file.endswith(".jsonl"):
        return [text]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise WorkloadError(f"--prompt-file {file}: there is no prompt in it")
    return [_read_line(f"--prompt-file {file}, line {number}", line) for number, line in lines]


def _read_line(where: str, line: str) -> str:
    """The prompt of a line: a JSON string, or an object's `prompt`."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise WorkloadError(f'{where}: it must be a JSON string, or an object with a "prompt"')
    return prompt
