"""What each command composes: its own workload, for `run` prompts from one place at most, and for
`inspect` a model that is named in one word.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from residency.conf.compose import Config, compose
from residency.conf.options import PRESETS, option_names, suggestion
from residency.conf.saved import read_saved
from residency.conf.schema import escaped
from residency.policies.base import Conflict
from residency.policies.errors import ConfigError, WorkloadError

MEASURED = "bench"  # the workload of a measurement that names no other
INSPECTED = ("model", "prefill")  # groups that sizes depend on: staging is the prefill's


def compose_run(
    overrides: list[str], prompts: list[str], files: list[str], config: Path | None = None
) -> Config:
    """For `run`. A prompt is a bare word among the overrides; or there are `prompts`, one or more;
    or they are read from `files`. config: a file that takes the place of the default choices.
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
    return _compose("run", "generate", rest, texts, config)


def compose_bench(overrides: list[str], file: Path | None = None) -> Config:
    """For `bench`. Raises ConfigError for what it would make void."""
    config = _compose("bench", MEASURED, overrides, [], file)
    for fault in measured_faults(config):
        raise ConfigError(str(fault))
    return config


def compose_with(overrides: list[str], file: Path | None) -> Config:
    """The combination of a file, or of the default choices, under overrides."""
    return compose(overrides, saved=read_saved(file) if file else None)


def compose_chat(overrides: list[str], file: Path | None = None) -> Config:
    """For `chat`."""
    return _compose("chat", "chat", overrides, [], file)


def measured_faults(config: Config) -> Iterator[Conflict]:
    """What a measurement would make void."""
    file = getattr(config.policies.cache.config, "warm_start", "")
    if file and config.workload.command == "bench":
        reason = (
            "`residency bench` empties the slots before what it times, or fills them itself; "
            "leave it out, or take `residency run`"
        )
        yield Conflict((f"cache.warm_start={file}",), reason, "cache.warm_start=''")


def swept_faults(config: Config) -> Iterator[Conflict]:
    """What a sweep would make void, or cannot run."""
    yield from measured_faults(config)
    if config.root.profile:
        reason = "a sweep compares times, and a profiled run is slower"
        yield Conflict(("profile=true",), reason, "profile=false")
    if config.workload.interactive:
        reason = "somebody has to talk to it"
        yield Conflict((f"workload={config.workload.name}",), reason, "workload=conversation")


def compose_inspect(words: list[str], file: Path | None = None) -> Config:
    """For `inspect`: a folder, or an option of the group model, or overrides that say either.

    Raises ConfigError for a word that is neither, and for keys that change nothing there.
    """
    overrides = [override for word in words for override in model_overrides(word)]
    for text in overrides:
        if text.lstrip("+~").partition("=")[0].partition(".")[0] not in INSPECTED:
            reason = f"`residency inspect` depends on {' and '.join(INSPECTED)} alone"
            raise ConfigError(f"{text}: {reason}")
    return compose_with(overrides, file)


def model_overrides(word: str) -> list[str]:
    """What a word of `inspect` or `plan` says: an override as it is, a model's name, or a folder.

    Raises ConfigError for a word that is neither.
    """
    if "=" in word and not Path(word).expanduser().is_dir():
        return [word]
    names = option_names("model")
    if word in names:
        return [f"model={word}"]
    if not Path(word).expanduser().exists():
        raise ConfigError(f"{word}: no such folder, and no such model; {suggestion(word, names)}")
    path = escaped(word).replace("'", "\\'")
    return ["model=folder", f"model.path='{path}'"]


def _compose(
    command: str, workload: str, overrides: list[str], prompts: list[str], file: Path | None
) -> Config:
    """workload: what the command runs unless the file, overrides or their preset choose another."""
    saved = read_saved(file) if file else None
    presets = [text for text in overrides if text.startswith(f"{PRESETS}=")]
    chosen = any(text.startswith("workload=") for text in overrides)
    chosen |= saved is not None and "workload" in saved.groups
    if not chosen and not (presets and compose(presets).workload.command == command):
        overrides = [f"workload={workload}", *overrides]
    config = compose(overrides, prompts=prompts, saved=saved)
    if (own := config.workload).command != command:
        raise ConfigError(
            f"workload={own.name}: `residency {own.command}` runs it; choose another for "
            f"`residency {command}`, e.g. workload={workload}"
        )
    if config.root.profile and command != "run":
        raise ConfigError(
            f"profile=true: `residency {command}` times, and a profiled run is slower; give "
            "profile=false, or take `residency run`"
        )
    return config


def require_folder(config: Config, folder: Path | None) -> None:
    """Raises ConfigError for a trace that would have no place."""
    if config.root.profile and folder is None:
        raise ConfigError(
            "profile=true: trace.json needs a folder; add --out DIR, or give profile=false"
        )


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
