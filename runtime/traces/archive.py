"""Routes in numpy's own files: an .npz with `expert_ids` [tokens, layers, k], or an .npy of it."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from residency.policies.errors import ConfigError
from residency.runtime.free_memory import GIB, free_host_bytes
from residency.runtime.results import write_whole
from residency.runtime.traces.trace import USUAL_PHASES, Array, Phases, Trace, trace_of

EXPERT_IDS, NUM_EXPERTS = "expert_ids", "num_experts"
STEPS = ("step_offsets", "step_decodes", "step_admits")
# What numpy raises for an .npy that is none: its header is parsed as Python's literals are.
BROKEN = (ValueError, TypeError, KeyError, IndexError, OSError, EOFError, SyntaxError, TokenError)
BEHIND, PASSED, LANDED = "step_behind", "passed", "landed"


def write_archive(trace: Trace, file: Path, option: str) -> None:
    """An .npz that whoever has numpy reads. Raises OutputError, which begins with `option`."""
    content = io.BytesIO()
    arrays: dict[str, Any] = {
        EXPERT_IDS: trace.ids_NLK,
        NUM_EXPERTS: np.int64(trace.space.num_experts),
        "decode": trace.decoded_N,
        "requests": trace.requests_N,
    }
    arrays |= zip(STEPS, (trace.step_offsets, trace.decode_S, trace.admits_S), strict=True)
    arrays |= {BEHIND: trace.behind_S, PASSED: trace.passed_P3, LANDED: trace.landed_P3}
    if trace.probs_NLK is not None:
        arrays["expert_probs"] = trace.probs_NLK
    np.savez_compressed(content, **arrays)
    write_whole({file: content.getvalue()}, option)


def read_archive(
    file: Path,
    num_experts: int | None = None,
    phases: Phases = USUAL_PHASES,
    prompt_tokens: int | None = None,
) -> Trace:
    """Raises ConfigError without naming the file.

    num_experts: of a layer, where the file does not say it. phases: for a file without steps.
    prompt_tokens: how many tokens of each request are its prompt's, for a file without phases.
    """
    arrays = _load(file)
    try:
        if num_experts is None and NUM_EXPERTS in arrays:
            num_experts = int(arrays[NUM_EXPERTS])
        ids, requests = arrays[EXPERT_IDS], arrays.get("requests")
        if requests is None and "request_offsets" in arrays:
            requests = _by_offsets(arrays["request_offsets"], len(ids))
        decoded = arrays.get("decode")
        if decoded is None and prompt_tokens is not None:
            decoded = _places(requests, len(ids)) >= prompt_tokens
        offsets, decodes, admits = (arrays.get(name) for name in STEPS)
        steps = None
        if offsets is not None and decodes is not None and admits is not None:
            steps = (offsets, decodes, admits)
        return trace_of(
            ids,
            num_experts,
            decoded_N=decoded,
            requests_N=requests,
            probs_NLK=arrays.get("expert_probs"),
            steps=steps,
            behind_S=None if steps is None else arrays.get(BEHIND),
            passed_P3=None if steps is None else arrays.get(PASSED),
            landed_P3=None if steps is None else arrays.get(LANDED),
            phases=phases,
        )
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(f"not an .npz with {EXPERT_IDS} ({error})") from error


def _by_offsets(offsets: Array, num_tokens: int) -> Array:
    """int32 [N] requests of tokens that lie request by request."""
    lengths: Array = np.diff(offsets.astype(np.int64))
    if (lengths < 0).any() or int(offsets[0]) != 0 or int(offsets[-1]) != num_tokens:
        raise ConfigError(f"request_offsets do not run from 0 to {num_tokens}")
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def _places(requests: Array | None, num_tokens: int) -> Array:
    """int64 [N] the place of each token in its request, whose tokens lie together."""
    places = np.arange(num_tokens)
    if requests is None:
        return places
    starts = np.flatnonzero(np.diff(requests, prepend=requests[0] - 1))
    lengths: Array = np.diff(starts, append=num_tokens)
    return places - np.repeat(starts, lengths)


def _require_memory(archive: zipfile.ZipFile) -> None:
    """A few bytes may unpack to any number of them."""
    unpacked, free = sum(info.file_size for info in archive.infolist()), free_host_bytes()
    if unpacked > free:
        raise ConfigError(
            f"unpacks to {unpacked / GIB:.2f} GiB of memory, and {free / GIB:.2f} GiB are free"
        )


def _load(file: Path) -> Mapping[str, Array]:
    try:
        with file.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {EXPERT_IDS: loaded}
            with loaded:
                _require_memory(loaded.zip)
                return {name: np.asarray(loaded[name]) for name in loaded.files}
    except (MemoryError, OverflowError) as error:
        raise ConfigError("its arrays say that they are larger than memory") from error
    except BROKEN as error:
        raise ConfigError(f"not an .npz with {EXPERT_IDS} ({error})") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"damaged ({error})") from error
