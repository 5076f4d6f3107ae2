"""What each command composes: its own workload, and for `run` a prompt from one place at most."""

from __future__ import annotations

import sys
from pathlib import Path

from residency.conf.compose import Config, compose
from residency.policies.errors import ConfigError, WorkloadError


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
