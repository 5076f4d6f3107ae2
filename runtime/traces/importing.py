"""Traces of other recorders, by the form of their file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from residency.policies.errors import ConfigError
from residency.runtime.traces.archive import read_archive
from residency.runtime.traces.lines import read_lines
from residency.runtime.traces.reading import is_numpy, read
from residency.runtime.traces.sglang import read_sglang
from residency.runtime.traces.trace import USUAL_PHASES, Phases, Trace


@dataclass(frozen=True)
class Hints:
    """What a recorder did not write down.

    num_experts: of a layer; None for the highest id + 1. num_layers, top_k: of arrays that come
    flat. prompt_tokens: of each request in a file that tells no phases, its first tokens are the
    prompt's. phases: how prompts are cut into steps.
    """

    num_experts: int | None = None
    num_layers: int | None = None
    top_k: int | None = None
    prompt_tokens: int | None = None
    phases: Phases = USUAL_PHASES


NO_HINTS = Hints()


def import_trace(source: str, hints: Hints = NO_HINTS, domains: str | None = None) -> Trace:
    """The trace in `source`: .npz, .npy, .jsonl, SGLang's .pt, or a trace file.

    domains: a JSON file, a list of names, one a request. Raises ConfigError that names the file.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"{source}: there is no such file")
    readers: Mapping[str, Callable[[Path, Hints], Trace]] = {
        ".jsonl": read_lines,
        ".json": read_lines,
        ".pt": lambda file, hints: read_sglang(file, hints.phases),
        ".safetensors": lambda file, hints: read(file, ""),
    }
    try:
        if path.suffix in readers:
            trace = readers[path.suffix](path, hints)
        elif is_numpy(path):
            trace = _archive(path, hints)
        else:
            known = ", ".join((".npz", ".npy", *readers))
            raise ConfigError(f"traces are read from files named {known}")
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(source) else f"{source}: {text}") from error
    about = dict(trace.about) | {"source": path.name}
    if domains is not None:
        about["domains"] = _domains(domains, int(trace.requests_N.max()) + 1)
    return replace(trace, about=about)


def _archive(path: Path, hints: Hints) -> Trace:
    return read_archive(path, hints.num_experts, hints.phases, hints.prompt_tokens)


def _domains(file: str, num_requests: int) -> list[str]:
    try:
        names: Any = json.loads(Path(file).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--domains {file}: cannot be read ({error})") from error
    if not isinstance(names, list) or len(names) != num_requests:
        raise ConfigError(f"--domains {file}: it must be a list of {num_requests} names")
    return [str(name) for name in names]
