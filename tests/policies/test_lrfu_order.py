"""LRFU ranks as the paper defines: exact at both ends of the spectrum, and at large times."""

import itertools
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.lrfu import NEVER, TOKEN_BITS, Lrfu
from residency.policies.step import IdSpace, Phase, Step

NUM_IDS = 8
LATE = 10**7
# What test_at_weight_1_the_bits_are_those_of_the_rule_without_weights says.
FRACTION_BITS = 18
SCORES = [262146067076, 262146129579, 262146051700, 262145436667]
SCORES += [262145884557, 262145489096, 262145515310, 262145541524]

# A history: for each token, the set of experts referenced. Gaps are tokens without a reference.
histories = st.lists(
    st.tuples(st.integers(1, 5), st.sets(st.integers(0, NUM_IDS - 1), min_size=1, max_size=4)),
    min_size=1,
    max_size=60,
)


def made(decay, weight=1.0):
    policy = Lrfu(Lrfu.Config(decay=decay, prefill_weight=weight))
    policy.allocate(IdSpace(1, NUM_IDS, 4), torch.device("cpu"))
    return policy


def ranked(decay, history, start=1):
    """Ids from first to last to be evicted, and the references of each: (order, {id: [token]})."""
    policy = made(decay)
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


# Of references in both phases: (phase, tokens since the last one, experts).
weighted_histories = st.lists(
    st.tuples(
        st.sampled_from(Phase),
        st.integers(0, 30),
        st.sets(st.integers(0, NUM_IDS - 1), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("start", [1, LATE])
@pytest.mark.parametrize("decay", [Fraction(0), Fraction(1, 10), Fraction(1, 2)])
@given(history=weighted_histories, weight=st.fractions(Fraction(1, 10**6), 1))
@settings(deadline=None, max_examples=25)
def test_order_is_that_of_the_exact_crf_with_weights(history, weight, decay, start):
    """Against the weighted sum itself, in 60 digits."""
    policy, token = made(float(decay), float(weight)), start
    references = []
    for phase, gap, ids in history:
        token += gap
        policy.touch(torch.tensor(sorted(ids)), Step(torch.tensor(token), 0, phase))
        references += [(i, token, float(weight) if phase is Phase.PREFILL else 1.0) for i in ids]
    crf = [Decimal(0)] * NUM_IDS
    with localcontext() as context:
        context.prec = 60
        for i, at, share in references:
            age = Decimal(token - at) * decay.numerator / decay.denominator
            crf[i] += Decimal(share) * Decimal(2) ** -age
    values = [crf[i] for i in policy.keys[:NUM_IDS].argsort(stable=True).tolist()]
    for lower, higher in itertools.pairwise(values):
        assert lower <= higher * Decimal(1 + 2e-4)


@given(history=weighted_histories, decay=st.floats(0, 1, allow_nan=False))
@settings(deadline=None, max_examples=25)
def test_at_weight_1_a_reference_is_one_in_either_phase(history, decay):
    mixed, decoded, token = made(decay), made(decay), LATE
    for phase, gap, ids in history:
        token += gap
        for policy, seen in ((mixed, phase), (decoded, Phase.DECODE)):
            policy.touch(torch.tensor(sorted(ids)), Step(torch.tensor(token), 0, seen))
    assert torch.equal(mixed.keys, decoded.keys) and torch.equal(mixed.scores, decoded.scores)


def test_at_weight_1_the_bits_are_those_of_the_rule_without_weights():
    """Scores and keys of a decode written down before there were weights."""
    policy = made(0.1)
    for token in range(LATE, LATE + 50):
        ids = torch.tensor(sorted({token % 3, token % 8, token * token % 7}))
        policy.touch(ids, Step(torch.tensor(token), 0, Phase.DECODE))
    assert policy.fraction_bits == FRACTION_BITS
    assert policy.scores[:NUM_IDS].tolist() == SCORES


@pytest.mark.parametrize("weight", [1.0, 0.5, 1e-3, 5e-324])
@pytest.mark.parametrize("decay", [0.0, 0.1, 1.0])
def test_an_expert_referenced_in_prefill_ranks_above_one_never_referenced(decay, weight):
    policy = made(decay, weight)
    policy.touch(torch.tensor([0]), Step(torch.tensor(0), 0, Phase.PREFILL))
    policy.touch(torch.tensor([1]), Step(torch.tensor(0), 0, Phase.DECODE))
    never, prefilled, decoded = policy.keys[2], policy.keys[0], policy.keys[1]
    assert never < prefilled and (weight == 1 or prefilled < decoded)


@given(
    weight=st.floats(1e-300, 1, exclude_min=True),
    decay=st.sampled_from([0.0, 0.1, 0.5]),
    history=weighted_histories,
)
@settings(deadline=None, max_examples=25)
def test_rebasing_keeps_the_order_of_weighted_references(weight, decay, history):
    policy, token = made(decay, weight), 1000
    for phase, gap, ids in history:
        token += gap
        policy.touch(torch.tensor(sorted(ids)), Step(torch.tensor(token), 0, phase))
    before = policy.keys[:NUM_IDS].argsort(stable=True)
    policy.rebase(900)
    assert torch.equal(policy.keys[:NUM_IDS].argsort(stable=True), before)


@settings(deadline=None)
@given(
    decay=st.floats(0, 1, allow_nan=False),
    weight=st.floats(0, 1, exclude_min=True),
    history=st.lists(
        st.tuples(
            st.integers(0, NUM_IDS - 1), st.integers(1, 300_000), st.sampled_from(list(Phase))
        ),
        max_size=40,
    ),
)
def test_vector_and_scalar_form_have_the_same_bits(decay, weight, history):
    policy = made(decay, weight)
    scalar = [NEVER] * NUM_IDS
    token = 0
    for i, gap, phase in history:
        token += gap
        policy.touch(torch.tensor([i]), Step(torch.tensor(token), 0, phase))
        scalar[i] = policy.advance(scalar[i], token, phase)
        assert policy.keys[i] == (scalar[i] << TOKEN_BITS) | token
    assert policy.scores[:NUM_IDS].tolist() == scalar


@given(decay=st.floats(0, 1, allow_nan=False), count=st.integers(2, 2000))
@settings(deadline=None, max_examples=25)
def test_every_reference_raises_the_score_even_of_an_expert_referenced_often(decay, count):
    policy = made(decay)
    scores = [NEVER]
    for token in range(count):
        scores.append(policy.advance(scores[-1], LATE + token))
    assert all(a < b for a, b in itertools.pairwise(scores))


@pytest.mark.parametrize("weight", [1.0, 0.3, 5e-324])
@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.001, 0.1, 0.5, 1.0])
def test_keys_fit_63_bits_at_the_horizon(decay, weight):
    policy = made(decay, weight)
    score = NEVER
    for token in range(policy.horizon - 3000, policy.horizon):
        score = policy.advance(score, token)
    # The score of an expert referenced at every token so far is above by log2 of their number.
    highest = score + (TOKEN_BITS << policy.fraction_bits)
    assert (highest << TOKEN_BITS) | policy.horizon < 2**63
