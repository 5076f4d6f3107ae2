"""Parts of a trace: so many of its tokens, cut where steps begin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from residency.policies.errors import ConfigError
from residency.runtime.traces.trace import Array, Trace


def part_of(trace: Trace, begin: float, end: float) -> Trace:
    """The steps that begin within these shares of the tokens, 0 to 1; the clock starts anew.

    Raises ConfigError where no step does.
    """
    bounds = np.array([begin, end]) * trace.num_tokens
    first, behind = np.searchsorted(trace.step_offsets[:-1], bounds - 1e-6)
    if first == behind:
        raise ConfigError(f"no step of the trace begins within {begin:.0%} to {end:.0%} of it")
    offsets = trace.step_offsets[first : behind + 1]
    tokens = slice(int(offsets[0]), int(offsets[-1]))
    steps = slice(int(first), int(behind))
    return replace(
        trace,
        ids_NLK=trace.ids_NLK[tokens],
        step_offsets=offsets - offsets[0],
        decode_S=trace.decode_S[steps],
        admits_S=trace.admits_S[steps],
        requests_N=trace.requests_N[tokens],
        behind_S=trace.behind_S[steps],
        passed_P3=_rows(trace.passed_P3, steps),
        landed_P3=_rows(trace.landed_P3, steps),
        probs_NLK=None if trace.probs_NLK is None else trace.probs_NLK[tokens],
    )


def _rows(rows_P3: Array, steps: slice) -> Array:
    """Those of the steps, numbered from the first of them."""
    own = rows_P3[(rows_P3[:, 0] >= steps.start) & (rows_P3[:, 0] < steps.stop)]
    renumbered: Array = own - np.array([steps.start, 0, 0], dtype=own.dtype)
    return renumbered
