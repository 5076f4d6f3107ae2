"""What each command composes: its own workload, for `run` a prompt from one place at most, and for
`inspect` a model that is named in one word.
"""

from __future__ import annotations

import sys
from pathlib import Path

from residency.conf.build import escaped
from residency.conf.compose import Config, compose
from residency.conf.options import option_names, suggestion
from residency.policies.errors import ConfigError, WorkloadError

INSPECTED = ("model", "prefill")  # groups that sizes depend on: staging is the prefill's


def compose_run(overrides: list[str], prompt: str | None, file: str | None) -> Config:
    """For `run`. The prompt is a bare word among the overrides, `prompt`, or read from `file`."""
    words = [text for text in overrides if "=" not in text and not text.startswith("~")]
    texts = words + ([] if prompt is None else [prompt])
    if len(texts) + (file is not None) > 1:
        given = ", ".join(repr(text) for text in texts) + (f" and {file}" if file else "")
        raise ConfigError(f"more than one prompt: {given}; an override has the form key=value")
    rest = [text for text in overrides if text not in words]
    text = _read_prompt(file) if file is not None else next(iter(texts), None)
    return _compose("run", "generate", rest, text)


def compose_bench(overrides: list[str]) -> Config:
    """For `bench`."""
    return _compose("bench", "bench", overrides, None)


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


def _compose(command: str, workload: str, overrides: list[str], prompt: str | None) -> Config:
    if not any(text.startswith("workload=") for text in overrides):
        overrides = [f"workload={workload}", *overrides]
    config = compose(overrides, prompt=prompt)
    if (chosen := config.workload.name) != workload:
        raise ConfigError(f"workload={chosen}: `residency {command}` runs workload={workload}")
    return config


def _read_prompt(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--prompt-file {file}: cannot be read ({error})") from error
