"""What the `residency trace` commands do: each is called with what the command line holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from residency.conf.commands import compose_run
from residency.conf.compose import Config
from residency.policies.errors import ConfigError, OutputError, WorkloadError
from residency.runtime.engine import Engine
from residency.runtime.results import require_writable
from residency.runtime.traces import Trace
from residency.runtime.traces.following import shape_text
from residency.runtime.traces.importing import Hints, import_trace
from residency.runtime.traces.trace import Phases
from residency.runtime.traces.writing import save

FILE = "FILE"
SUFFIXES = (".safetensors", ".npz")


def check_file(file: Path, force: bool) -> None:
    """Raises OutputError now if a trace could not be written to `file` later."""
    if file.suffix not in SUFFIXES:
        raise OutputError(f"{file}: a trace's name ends in {' or '.join(SUFFIXES)}")
    require_writable(file, FILE)
    if file.exists() and not force:
        raise OutputError(f"{file}: is there already; choose another name or add --force")


def compose_record(overrides: list[str], prompts: list[str], files: list[str]) -> list[Config]:
    """A run for each prompt: they are recorded one after the other."""
    config = compose_run(overrides, prompts, files)
    if config.root.profile:
        raise ConfigError(
            "profile=true: `residency run` does that, with --out DIR; give profile=false"
        )
    texts = config.workload.config.prompts
    if not texts:
        return [config]
    words = [text for text in overrides if not text.startswith("workload.prompts=")]
    return [compose_run(words, [text], []) for text in texts]


def record(configs: list[Config], engine: Engine, file: Path) -> Trace:
    """Run each workload on `engine`, whose slots start empty, and write what it was routed to."""
    if engine.runtime.recorder is not None:
        raise WorkloadError("the engine records already")
    recorder = engine.record_routes()
    for config in configs:
        recorder.next_request()
        config.workload.run(engine)
    policies = configs[0].policies
    groups = {"cache": policies.cache, "prefill": policies.prefill, "decode": policies.decode}
    about = {
        "model": configs[0].model.name,
        "combination": " ".join(f"{group}={part.name}" for group, part in groups.items()),
    }
    trace = recorder.trace(about)
    save(trace, file, FILE)
    return trace


def told(trace: Trace, file: Path) -> dict[str, Any]:
    """What is said of a trace that was written."""
    return {
        "file": str(file),
        "tokens": trace.num_tokens,
        "steps": trace.num_steps,
        "shape": shape_text(trace.space),
        "bytes": file.stat().st_size,
    }


def import_file(
    source: str,
    file: Path,
    domains: str | None,
    *,
    experts: int | None,
    layers: int | None,
    top_k: int | None,
    prompt_tokens: int | None,
    chunk_tokens: int,
    admit_tokens: int,
) -> Trace:
    """Read what another recorder wrote, and write a trace file."""
    if chunk_tokens < 1:
        raise ConfigError(f"--chunk-tokens {chunk_tokens}: it must be at least 1")
    phases = Phases(chunk_tokens, admit_tokens)
    trace = import_trace(source, Hints(experts, layers, top_k, prompt_tokens, phases), domains)
    save(trace, file, FILE)
    return trace
