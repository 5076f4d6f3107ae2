"""The trace file: safetensors, so that it can be mapped, and read by what others have.

docs/traces.md describes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from residency.policies.errors import CheckpointError, ConfigError
from residency.runtime.checkpoint import LENGTH_BYTES, METADATA, entries_of
from residency.runtime.results import write_whole
from residency.runtime.traces.trace import Array, Trace, trace_of, usual_behind

FORMAT, VERSION = "residency-trace", 1
DTYPES: dict[str, Any] = {
    "U8": np.uint8,
    "U16": np.uint16,
    "F16": np.float16,
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
}
REQUIRED = ("expert_ids", "step_offsets", "step_decodes", "step_admits", "requests")


def write_mapped(trace: Trace, file: Path, option: str) -> None:
    """Write the whole file or nothing. Raises OutputError, which begins with `option`."""
    arrays = {
        "expert_ids": trace.ids_NLK,
        "step_offsets": trace.step_offsets,
        "step_decodes": trace.decode_S,
        "step_admits": trace.admits_S,
        "requests": trace.requests_N,
    }
    usual_S = usual_behind(trace.step_offsets, trace.decode_S, trace.requests_N)
    if not np.array_equal(trace.behind_S, usual_S):
        arrays["step_behind"] = trace.behind_S
    arrays |= {"passed": trace.passed_P3} if len(trace.passed_P3) else {}
    arrays |= {"landed": trace.landed_P3} if len(trace.landed_P3) else {}
    if trace.probs_NLK is not None:
        arrays["expert_probs"] = trace.probs_NLK
    head = {"format": FORMAT, "version": str(VERSION)}
    head["num_experts"] = str(trace.space.num_experts)
    head["about"] = json.dumps(dict(trace.about))
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole({file: save(whole, head)}, option)


def read_mapped(file: Path) -> Trace:
    """The trace, its large arrays mapped. Raises ConfigError without naming the file."""
    try:
        entries = {entry.key: entry for entry in entries_of(file)}
    except CheckpointError as error:
        raise ConfigError(f"no trace: {error}") from error
    head = _metadata(file)
    if (head.get("format"), head.get("version")) != (FORMAT, str(VERSION)):
        said = f"{head.get('format', 'none')} {head.get('version', '')}".strip()
        raise ConfigError(f"its format is {said}, not {FORMAT} {VERSION}")
    arrays: dict[str, Array] = {}
    for key, entry in entries.items():
        if entry.dtype_name not in DTYPES:
            raise ConfigError(f"{key} is {entry.dtype_name}, which no trace holds")
        arrays[key] = np.memmap(
            file, DTYPES[entry.dtype_name], mode="r", offset=entry.offset, shape=entry.shape
        )
    if missing := [key for key in REQUIRED if key not in arrays]:
        raise ConfigError(f"it has no {missing[0]}")
    try:
        num_experts, about = int(head["num_experts"]), dict(json.loads(head.get("about", "{}")))
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError("its header does not say num_experts, or about, rightly") from error
    steps = (arrays["step_offsets"], arrays["step_decodes"], arrays["step_admits"])
    return trace_of(
        arrays["expert_ids"],
        num_experts,
        requests_N=arrays["requests"],
        probs_NLK=arrays.get("expert_probs"),
        steps=steps,
        behind_S=arrays.get("step_behind"),
        passed_P3=arrays.get("passed"),
        landed_P3=arrays.get("landed"),
        about=about,
    )


def _metadata(file: Path) -> dict[str, str]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        head: dict[str, str] = json.loads(stream.read(length)).get(METADATA, {})
    return head
