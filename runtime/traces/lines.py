"""Routes as JSON lines: a request a line, as servers return them, or a token's layer a line.

A request: `routed_experts` (also `expert_ids`), nested lists [tokens, layers, k], or base64 of an
.npy (vLLM) or of int32 (SGLang, whose shape must be told); `prompt_tokens`, how many of the tokens
are the prompt's; `domain`. It may be inside `meta_info`, or in the first of `choices`.
A token's layer: `token`, `layer`, `experts`, and where known `probs`, `phase`, `request`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from residency.policies.errors import ConfigError
from residency.policies.step import Phase
from residency.runtime.traces.archive import BROKEN
from residency.runtime.traces.trace import Array, Trace, trace_of

if TYPE_CHECKING:
    from residency.runtime.traces.importing import Hints

WHOLE = ("routed_experts", "expert_ids")
PARTS = ("experts", "topk_ids")
PROBS = ("probs", "topk_weights")
Line = tuple[str, Mapping[str, Any]]  # where it stands, and what it says


def read_lines(file: Path, hints: Hints) -> Trace:
    """Raises ConfigError without naming the file."""
    lines = list(_objects(file))
    if not lines:
        raise ConfigError("there is no line in it")
    if _first(lines[0][1], PARTS) is not None:
        return _of_parts(lines, hints)
    return _of_requests(lines, hints)


def _of_requests(lines: list[Line], hints: Hints) -> Trace:
    tables = [_table(where, line, hints) for where, line in lines]
    if len({table.shape[1:] for table in tables}) != 1:
        raise ConfigError("its lines have different layers or k")
    decoded = []
    for (where, line), table in zip(lines, tables, strict=True):
        prompt = line.get("prompt_tokens", hints.prompt_tokens or 0)
        if not isinstance(prompt, int) or not 0 <= prompt <= len(table):
            raise ConfigError(f"{where}: prompt_tokens={prompt} of {len(table)} tokens")
        decoded.append(np.arange(len(table)) >= prompt)
    domains = [line.get("domain") for _, line in lines]
    return trace_of(
        np.concatenate(tables),
        hints.num_experts,
        decoded_N=np.concatenate(decoded),
        requests_N=np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        phases=hints.phases,
        about={"domains": domains} if all(domains) else {},
    )


def _table(where: str, line: Mapping[str, Any], hints: Hints) -> Array:
    """Integers [tokens, layers, k] of one request."""
    value = _first(line, WHOLE)
    choices = line.get("choices")
    for inner in (line.get("meta_info"), *(choices[:1] if isinstance(choices, list) else [])):
        if value is None and isinstance(inner, dict):
            value = _first(inner, WHOLE)
    try:
        array = _decoded(value, hints) if isinstance(value, str) else np.array(value)
    except (*BROKEN, MemoryError, OverflowError, binascii.Error) as error:
        raise ConfigError(f"{where}: {WHOLE[0]} cannot be read ({error})") from error
    if array.ndim != 3 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{where}: {WHOLE[0]} is not integers [tokens, layers, k]")
    return array


def _decoded(text: str, hints: Hints) -> Array:
    content = base64.b64decode(text, validate=True)
    if content.startswith(b"\x93NUMPY"):
        array: Array = np.load(io.BytesIO(content), allow_pickle=False)
        return array
    if hints.num_layers is None or hints.top_k is None:
        raise ValueError("its shape is not told; give --layers and --top-k")
    return np.frombuffer(content, "<i4").reshape(-1, hints.num_layers, hints.top_k)


def _of_parts(lines: list[Line], hints: Hints) -> Trace:
    """Tokens in the order in which they first appear; every token needs every layer."""
    rows: dict[tuple[int, int], int] = {}
    cells: dict[tuple[int, int], tuple[Any, Any]] = {}
    decoded: list[bool] = []
    for where, line in lines:
        try:
            request, layer = int(line.get("request", 0)), int(line["layer"])
            token = int(line["token"] if "token" in line else line["token_idx"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{where}: token, layer or request is no number") from error
        row = rows.setdefault((request, token), len(rows))
        if row == len(decoded):
            decoded.append(line.get("phase", Phase.DECODE) == Phase.DECODE)
        if (row, layer) in cells:
            raise ConfigError(f"{where}: token {token}, layer {layer} is there a second time")
        cells[row, layer] = (_first(line, PARTS), _first(line, PROBS))
    layers = sorted({layer for _, layer in cells})
    if len(cells) != len(rows) * len(layers):
        raise ConfigError(f"{len(cells)} lines are not {len(rows)} tokens x {len(layers)} layers")
    grid = [[cells[row, layer] for layer in layers] for row in range(len(rows))]
    probs = None
    try:
        ids = np.array([[ids for ids, _ in row] for row in grid])
        if all(probs is not None for row in grid for _, probs in row):
            probs = np.array([[probs for _, probs in row] for row in grid], dtype=np.float16)
    except (ValueError, TypeError) as error:
        raise ConfigError("tokens have different numbers of experts") from error
    return trace_of(
        ids,
        hints.num_experts,
        decoded_N=np.array(decoded),
        requests_N=np.array([request for request, _ in rows]),
        probs_NLK=probs,
        phases=hints.phases,
    )


def _objects(file: Path) -> Iterator[Line]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ConfigError(f"line {number}: not a JSON object")
        yield f"line {number}", value


def _first(line: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((line[name] for name in names if line.get(name) is not None), None)
