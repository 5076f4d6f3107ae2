"""LRFU ranks as the paper defines: exact at both ends of the spectrum, and at large times."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.lrfu import NEVER, TOKEN_BITS, Lrfu
from residency.policies.step import IdSpace, Phase, Step

NUM_IDS = 8
LATE = 10**7

# A history: for each token, the set of experts referenced. Gaps are tokens without a reference.
histories = st.lists(
    st.tuples(st.integers(1, 5), st.sets(st.integers(0, NUM_IDS - 1), min_size=1, max_size=4)),
    min_size=1,
    max_size=60,
)


def ranked(decay, history, start=1):
    """Ids from first to last to be evicted, and the references of each: (order, {id: [token]})."""
    policy = Lrfu(Lrfu.Config(decay=decay))
    policy.allocate(IdSpace(1, NUM_IDS, 4), torch.device("cpu"))
    references = {i: [] for i in range(NUM_IDS)}
    token = start
    for gap, ids in history:
        token += gap
        policy.touch(torch.tensor(sorted(ids)), Step(torch.tensor(token), 0, Phase.DECODE))
        for i in ids:
            references[i].append(token)
    order = policy.keys[:NUM_IDS].argsort(stable=True).tolist()
    return order, references


@pytest.mark.parametrize("start", [1, LATE])
@given(history=histories)
def test_decay_0_orders_as_lfu_then_last_reference_then_id(history, start):
    order, references = ranked(0.0, history, start)
    expected = sorted(
        range(NUM_IDS), key=lambda i: (len(references[i]), references[i][-1:] or [0], i)
    )
    assert order == expected


@pytest.mark.parametrize("start", [1, LATE])
@given(history=histories)
def test_decay_1_never_ranks_a_later_last_reference_lower(history, start):
    order, references = ranked(1.0, history, start)
    last = [references[i][-1] if references[i] else 0 for i in order]
    assert last == sorted(last)


@pytest.mark.parametrize("start", [1, LATE])
@pytest.mark.parametrize("decay", [Fraction(1, 2), Fraction(1, 10)])
@settings(deadline=None)
@given(history=histories)
def test_order_is_that_of_the_exact_crf_wherever_the_two_differ_at_all(history, decay, start):
    """Against the sum itself, in high precision; only near-ties below the resolution may swap."""
    order, references = ranked(float(decay), history, start)
    now = max(max(r) for r in references.values() if r)

    def crf(i):
        return sum(2.0 ** float(decay * (t - now)) for t in references[i])

    values = [crf(i) for i in order]
    for lower, higher in itertools.pairwise(values):
        assert lower <= higher * (1 + 2e-4)


@settings(deadline=None)
@given(
    decay=st.floats(0, 1, allow_nan=False),
    history=st.lists(st.tuples(st.integers(0, NUM_IDS - 1), st.integers(1, 300_000)), max_size=40),
)
def test_vector_and_scalar_form_have_the_same_bits(decay, history):
    policy = Lrfu(Lrfu.Config(decay=decay))
    policy.allocate(IdSpace(1, NUM_IDS, 4), torch.device("cpu"))
    scalar = [NEVER] * NUM_IDS
    token = 0
    for i, gap in history:
        token += gap
        policy.touch(torch.tensor([i]), Step(torch.tensor(token), 0, Phase.DECODE))
        scalar[i] = policy.advance(scalar[i], token)
        assert policy.keys[i] == (scalar[i] << TOKEN_BITS) | token
    assert policy.scores[:NUM_IDS].tolist() == scalar


@given(decay=st.floats(0, 1, allow_nan=False), count=st.integers(2, 2000))
@settings(deadline=None, max_examples=25)
def test_every_reference_raises_the_score_even_of_an_expert_referenced_often(decay, count):
    policy = Lrfu(Lrfu.Config(decay=decay))
    policy.allocate(IdSpace(1, NUM_IDS, 4), torch.device("cpu"))
    scores = [NEVER]
    for token in range(count):
        scores.append(policy.advance(scores[-1], LATE + token))
    assert all(a < b for a, b in itertools.pairwise(scores))


@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.001, 0.1, 0.5, 1.0])
def test_keys_fit_63_bits_at_the_horizon(decay):
    policy = Lrfu(Lrfu.Config(decay=decay))
    policy.allocate(IdSpace(1, NUM_IDS, 4), torch.device("cpu"))
    score = NEVER
    for token in range(policy.horizon - 3000, policy.horizon):
        score = policy.advance(score, token)
    # The score of an expert referenced at every token so far is above by log2 of their number.
    highest = score + (TOKEN_BITS << policy.fraction_bits)
    assert (highest << TOKEN_BITS) | policy.horizon < 2**63
