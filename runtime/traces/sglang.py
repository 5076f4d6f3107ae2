"""SGLang's expert distribution recorder, mode per_token: a .pt file of one rank.

`records` holds one entry a forward pass: `forward_pass_id`, `forward_mode` (2 decodes),
`topk_ids_of_layer` [model layers, tokens, k], `extend_seq_lens` of prompts; physical ids are
mapped by `last_physical_to_logical_map` [model layers, physical experts]. Files of the other modes
hold counts, from which no route can be told.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from residency.policies.errors import ConfigError, one_line
from residency.runtime.traces.trace import UNKNOWN, USUAL_PHASES, Array, Phases, Trace, trace_of

ARCHIVE = b"PK\x03\x04"  # by these torch knows its own
DECODE = 2
IDS, MAP = "topk_ids_of_layer", "last_physical_to_logical_map"


def read_sglang(file: Path, phases: Phases = USUAL_PHASES) -> Trace:
    """Each forward pass is a step. Raises ConfigError without naming the file."""
    try:
        # What torch wrote before it wrote archives has no checksums, and lengths to be believed.
        with open(file, "rb") as opened:
            if opened.read(len(ARCHIVE)) != ARCHIVE:
                raise UnpicklingError("it is no archive")
        with warnings.catch_warnings(action="ignore"):  # on what it then refuses
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch raise
        raise ConfigError(f"not a .pt file of plain tensors ({one_line(str(error))})") from error
    try:
        records = [dict(record) for record in content["records"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(_no_routes("there are no records")) from error
    if not records or IDS not in records[0]:
        raise ConfigError(_no_routes(f"its records have no {IDS}"))
    records = [record for record in records if record[IDS].shape[1]]
    records.sort(key=lambda record: int(record.get("forward_pass_id", 0)))
    passes = [record[IDS].numpy().astype(np.int64) for record in records]
    if not passes or len({(one.shape[0], one.shape[2]) for one in passes}) != 1:
        raise ConfigError(f"{IDS} is not [layers, tokens, k] of one model in all records")
    ids_LNK, layers = _moe_layers(np.concatenate(passes, axis=1))
    num_experts = None
    if content.get(MAP) is not None:
        logical_LP = content[MAP].numpy()[layers]
        ids_LNK = np.take_along_axis(logical_LP[:, None, :], ids_LNK, axis=2)
        num_experts = int(logical_LP.max()) + 1
    tokens_S = np.array([one.shape[1] for one in passes])
    decode_S = np.array([int(record.get("forward_mode", DECODE)) == DECODE for record in records])
    return trace_of(
        np.ascontiguousarray(ids_LNK.transpose(1, 0, 2)),
        num_experts,
        requests_N=_requests(records, tokens_S, decode_S),
        steps=(
            np.concatenate([[0], np.cumsum(tokens_S)]),
            decode_S,
            decode_S | (tokens_S <= phases.admit_tokens),
        ),
        about={"recorder": "sglang per_token"},
    )


def _moe_layers(ids_LNK: Array) -> tuple[Array, Array]:
    """The layers that have routes, and their indices; dense ones hold one value throughout."""
    ids_LNK = ids_LNK[:, :, (ids_LNK >= 0).any(axis=(0, 1))]
    first = ids_LNK.reshape(len(ids_LNK), -1)[:, :1, None]
    layers = np.flatnonzero((ids_LNK != first).any(axis=(1, 2)))
    if not len(layers):
        raise ConfigError(f"{IDS} holds no routes")
    return ids_LNK[layers], layers


def _requests(records: list[dict[str, Any]], tokens_S: Array, decode_S: Array) -> Array:
    """int32 [N]: prompts are counted; a token decoded by itself belongs to the last prompt, others
    are UNKNOWN, because the recorder does not name them.
    """
    found: list[Array] = []
    count = 0
    for record, tokens, decodes in zip(records, tokens_S, decode_S, strict=True):
        lengths = list(record.get("extend_seq_lens") or [])
        if not decodes and sum(lengths) == tokens:
            found.append(np.repeat(np.arange(count, count + len(lengths)), lengths))
            count += len(lengths)
        else:
            found.append(np.full(tokens, max(count - 1, 0) if tokens == 1 else UNKNOWN))
    return np.concatenate(found).astype(np.int32)


def _no_routes(reason: str) -> str:
    return f"{reason}; record with --expert-distribution-recorder-mode per_token"
