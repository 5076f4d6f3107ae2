"""Traces that are made up, and a plain judge of what a pool does with them."""

import numpy as np
from hypothesis import strategies as st

from residency.runtime.traces.trace import ALL, trace_of


def made_trace(
    seed,
    *,
    tokens=40,
    layers=2,
    experts=8,
    top_k=2,
    prompts=(),
    admit_tokens=64,
    passing=0,
    landing=0,
):
    """Skewed routes; each of `prompts` (first token, end) is one step of prefill.

    passing, landing: of the routes of prompts that admit, how many pass by or have landed.
    """
    rng = np.random.default_rng(seed)
    weights = rng.permuted(np.tile(1.0 / (1 + np.arange(experts)), (layers, 1)), axis=1)
    noise = rng.gumbel(size=(tokens, layers, experts)) + np.log(weights)
    ids = np.argsort(-noise, axis=2)[..., :top_k]
    decoded = np.ones(tokens, dtype=bool)
    starts = set(range(tokens))
    for first, end in prompts:
        decoded[first:end] = False
        starts -= set(range(first + 1, end))
    offsets = np.array([*sorted(starts), tokens])
    decode_S = decoded[offsets[:-1]]
    admits_S = decode_S | (np.diff(offsets) <= admit_tokens)
    rows = [
        (step, layer, expert)
        for step in np.flatnonzero(~decode_S & admits_S)
        for layer in range(layers)
        for expert in np.unique(ids[offsets[step] : offsets[step + 1], layer])
    ]
    rows = rng.permutation(np.array(rows, dtype=np.int32).reshape(-1, 3))
    passed = rows[:passing].copy()
    passed[passing // 2 : passing // 2 + 1, 2] = ALL
    landed = rows[passing : passing + landing]
    steps = (offsets, decode_S, admits_S)
    return trace_of(ids, experts, steps=steps, passed_P3=passed, landed_P3=landed)


@st.composite
def traces(draw):
    """With prompts of which some enter the slots and some do not, in waves where they are long."""
    tokens = draw(st.integers(8, 40))
    first = draw(st.integers(0, tokens - 2))
    end = draw(st.integers(first + 1, tokens))
    return made_trace(
        draw(st.integers(0, 1 << 16)),
        tokens=tokens,
        layers=draw(st.integers(1, 3)),
        experts=draw(st.integers(4, 10)),
        top_k=draw(st.integers(1, 3)),
        prompts=[(first, end)],
        admit_tokens=draw(st.sampled_from([0, 64])),
        passing=draw(st.integers(0, 3)),
        landing=draw(st.integers(0, 3)),
    )
