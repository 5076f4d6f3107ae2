"""A trace: the routes of a run, the steps they were taken in, and whose tokens they were.

Shapes: N tokens, L MoE layers, K experts a token, S steps, R requests. A step is one pass of the
model: over a chunk of a prompt, or over the tokens that are decoded together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace

Array = np.ndarray[Any, Any]
ALL = -1  # experts of a layer
UNKNOWN = -1  # the request of a token whose recorder did not say
CHECKED_TOKENS = 1 << 14  # so many at a time: a mapped file is never whole in memory


@dataclass(frozen=True)
class Phases:
    """How tokens whose recorder told phases, but no steps, are cut into steps.

    chunk_tokens: of a prompt that the model takes at a time. admit_tokens: the longest chunk whose
    experts enter the slots, as prefill=demand has it; 0 for none.
    """

    chunk_tokens: int = 8192
    admit_tokens: int = 256


USUAL_PHASES = Phases()


@dataclass(frozen=True)
class Trace:
    """Routes in the order in which tokens went through the model.

    ids_NLK: uint8 or uint16, experts within the layer, distinct within a token, in router order.
    step_offsets: int64 [S + 1], the tokens of step s are offsets[s] to offsets[s + 1].
    decode_S: bool, whether the step decodes. admits_S: bool, whether its missing experts enter
    the slots; a decode step's do. requests_N: int32, UNKNOWN where it is not known.
    behind_S: int64, tokens of the prompt that come after the step; 0 in decode.
    passed_P3, landed_P3: int32 (step, layer, expert within the layer) of prompts that admit: who
    passed the slots by all the same, ALL for whoever the layer misses; and who entered them before
    the others, having been fetched ahead.
    probs_NLK: float16 weights of the router, or None. about: what is said of the run; `domains`
    is a list of names, one a request.
    """

    space: IdSpace
    ids_NLK: Array
    step_offsets: Array
    decode_S: Array
    admits_S: Array
    requests_N: Array
    behind_S: Array
    passed_P3: Array
    landed_P3: Array
    probs_NLK: Array | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.ids_NLK)

    @property
    def num_steps(self) -> int:
        return len(self.decode_S)

    @property
    def accesses(self) -> int:
        """Experts that tokens were routed to, over all layers."""
        return int(np.prod(self.ids_NLK.shape))

    @property
    def step_tokens(self) -> Array:
        """int64 [S] tokens of each step."""
        return np.diff(self.step_offsets)

    @property
    def step_clocks(self) -> Array:
        """int64 [S] the engine's clock in each step: the index of its last token, from 0. Tokens
        that are decoded together share one tick.
        """
        return np.cumsum(np.where(self.decode_S, 1, self.step_tokens)) - 1

    @property
    def decoded_N(self) -> Array:
        """bool [N] whether each token was decoded."""
        return np.repeat(self.decode_S, self.step_tokens)

    @property
    def batch(self) -> int:
        """Most tokens decoded together; 1 where nothing was decoded."""
        return int(self.step_tokens[self.decode_S].max(initial=1))

    @property
    def request_names(self) -> list[str] | None:
        """The domain of each request, where it is told."""
        names = self.about.get("domains")
        return [str(name) for name in names] if isinstance(names, list) else None


def trace_of(
    ids_NLK: Array,
    num_experts: int | None = None,
    *,
    decoded_N: Array | None = None,
    requests_N: Array | None = None,
    probs_NLK: Array | None = None,
    steps: tuple[Array, Array, Array] | None = None,
    behind_S: Array | None = None,
    passed_P3: Array | None = None,
    landed_P3: Array | None = None,
    phases: Phases = USUAL_PHASES,
    about: Mapping[str, Any] | None = None,
) -> Trace:
    """A trace from what a recorder told, checked. Raises ConfigError without naming a file.

    ids_NLK: any integers. num_experts: None for the highest id + 1. decoded_N: bool, None if all
    tokens were. steps: (step_offsets, decode_S, admits_S), None to cut them as `phases` says: each
    decoded token is a step. requests_N: None for one request. behind_S: None where chunks of one
    request that follow one another are one prompt. passed_P3, landed_P3: None for nobody.
    """
    ids_NLK, num_experts = _checked_ids(ids_NLK, num_experts)
    num_tokens, num_layers, top_k = ids_NLK.shape
    if requests_N is None:
        requests_N = np.zeros(num_tokens, dtype=np.int32)
    decoded_N = np.ones(num_tokens, dtype=bool) if decoded_N is None else decoded_N.astype(bool)
    for name, array, shape in (
        ("the decode flags", decoded_N, (num_tokens,)),
        ("the requests", requests_N, (num_tokens,)),
        ("the probabilities", probs_NLK, ids_NLK.shape),
    ):
        if array is not None and array.shape != shape:
            raise ConfigError(f"{name} are {list(array.shape)}, not {list(shape)}")
    if steps is None:
        steps = _cut(decoded_N, requests_N, phases)
    step_offsets, decode_S, admits_S = steps
    _check_steps(step_offsets, decode_S, admits_S, num_tokens)
    space, num_steps = IdSpace(num_layers, num_experts, top_k), len(decode_S)
    if behind_S is None:
        behind_S = usual_behind(step_offsets, decode_S, requests_N)
    elif behind_S.shape != decode_S.shape or (behind_S < 0).any():
        raise ConfigError("the tokens behind each step are not as many as the steps, or below 0")
    return Trace(
        space,
        ids_NLK,
        step_offsets.astype(np.int64),
        decode_S.astype(bool),
        admits_S.astype(bool),
        requests_N.astype(np.int32),
        behind_S.astype(np.int64),
        _checked_rows("those that pass by", passed_P3, num_steps, space, ALL),
        _checked_rows("those that landed", landed_P3, num_steps, space, 0),
        None if probs_NLK is None else probs_NLK.astype(np.float16, copy=False),
        dict(about or {}),
    )


def _checked_ids(ids: Array, stated: int | None) -> tuple[Array, int]:
    if ids.ndim != 3 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(
            f"expert_ids is {ids.dtype} {list(ids.shape)}, not integer 3-D [tokens, layers, k]"
        )
    lowest, highest = int(ids.min()), int(ids.max())
    num_experts = highest + 1 if stated is None else stated
    if lowest < 0 or not highest < num_experts <= np.iinfo(np.int16).max:
        raise ConfigError(f"expert ids from {lowest} to {highest} of {num_experts}")
    for start in range(0, len(ids), CHECKED_TOKENS):
        ascending = np.sort(ids[start : start + CHECKED_TOKENS], axis=2)
        if (ascending[..., 1:] == ascending[..., :-1]).any():
            raise ConfigError("a token names an expert twice in one layer")
    small = np.uint8 if num_experts <= 256 else np.uint16
    return ids.astype(small, copy=False), num_experts


def _check_steps(offsets: Array, decode_S: Array, admits_S: Array, num_tokens: int) -> None:
    whole = len(offsets) > 1 and int(offsets[0]) == 0 and int(offsets[-1]) == num_tokens
    if not whole or (np.diff(offsets) < 1).any():
        raise ConfigError(f"the steps do not cover the {num_tokens} tokens, each by one")
    if decode_S.shape != admits_S.shape or len(decode_S) != len(offsets) - 1:
        raise ConfigError("the steps' phases are not as many as the steps")


def _checked_rows(
    what: str, rows_P3: Array | None, num_steps: int, space: IdSpace, lowest: int
) -> Array:
    if rows_P3 is None:
        return np.zeros((0, 3), dtype=np.int32)
    ends = np.array([num_steps, space.num_layers, space.num_experts])
    if rows_P3.ndim != 2 or rows_P3.shape[1] != 3 or not np.issubdtype(rows_P3.dtype, np.integer):
        raise ConfigError(f"{what} are {rows_P3.dtype} {list(rows_P3.shape)}, not integer [P, 3]")
    if (rows_P3 < [0, 0, lowest]).any() or (rows_P3 >= ends).any():
        raise ConfigError(f"{what} name a step, a layer or an expert that there is not")
    return rows_P3.astype(np.int32)


def usual_behind(offsets: Array, decode_S: Array, requests_N: Array) -> Array:
    """int64 [S] tokens of the same prompt behind each step: chunks of one request in a row."""
    requests_S = requests_N[offsets[:-1]]
    joined = ~decode_S[1:] & ~decode_S[:-1] & (requests_S[1:] == requests_S[:-1])
    # The step with which each prompt ends: the next one that is not joined to its follower.
    steps = np.arange(len(decode_S))
    last = np.where(np.append(joined, False), len(decode_S), steps)
    last = np.minimum.accumulate(last[::-1])[::-1]
    behind: Array = offsets[last + 1] - offsets[1:]
    return behind


def _cut(decoded_N: Array, requests_N: Array, phases: Phases) -> tuple[Array, Array, Array]:
    """Steps of tokens that came one after the other: each decoded one by itself, prompts in
    chunks.
    """
    num_tokens = len(decoded_N)
    changes = (decoded_N[1:] != decoded_N[:-1]) | (requests_N[1:] != requests_N[:-1])
    runs = np.concatenate([[0], np.flatnonzero(changes) + 1, [num_tokens]])
    starts = [
        np.arange(start, end, 1 if decoded_N[start] else phases.chunk_tokens)
        for start, end in itertools.pairwise(runs)
    ]
    offsets = np.concatenate([*starts, [num_tokens]])
    decode_S = decoded_N[offsets[:-1]]
    return offsets, decode_S, decode_S | (np.diff(offsets) <= phases.admit_tokens)
