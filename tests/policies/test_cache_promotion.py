"""Which of a prompt's tokens are references: `CachePolicy.promoted`, whatever the chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.conf import compose
from residency.policies.cache.lru import Lru
from residency.policies.cache.none import NoCache


def promoted(last, chunks):
    """By chunk, how many of its tokens."""
    policy, behind, counts = Lru(Lru.Config(prefill_tokens=last)), sum(chunks), []
    for size in chunks:
        behind -= size
        counts.append(policy.promoted(size, behind))
    return counts


@given(last=st.integers(0, 100), chunks=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_they_are_the_last_of_the_prompt_however_it_is_cut(last, chunks):
    flags = []
    for size, count in zip(chunks, promoted(last, chunks), strict=True):
        flags += [False] * (size - count) + [True] * count
    first = max(0, sum(chunks) - last)
    assert flags == [False] * first + [True] * (sum(chunks) - first)


@given(chunks=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_all_are_all(chunks):
    assert promoted("all", chunks) == chunks


def test_a_number_may_be_written_as_text():
    assert promoted("7", [5, 5]) == promoted(7, [5, 5]) == [2, 5]


def test_a_cache_that_keeps_nothing_promotes_nothing():
    assert NoCache(NoCache.Config()).promoted(9, 0) == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cache.prefill_tokens=-1", ("from 0 up, or all", "cache.prefill_tokens=all")),
        ("cache.prefill_tokens=some", ("from 0 up, or all", "cache.prefill_tokens=all")),
        ("cache.prefill_tokens=50%", ("from 0 up, or all", "cache.prefill_tokens=all")),
        ("cache.prefill_weight=0", ("above 0 and at most 1", "cache.prefill_weight=1.0")),
        ("cache.prefill_weight=1.5", ("above 0 and at most 1", "cache.prefill_weight=1.0")),
        ("cache.prefill_weight=nan", ("above 0 and at most 1", "cache.prefill_weight=1.0")),
    ],
)
def test_values_that_say_nothing_are_refused(override, words):
    (conflict,) = compose([override]).conflicts()
    assert override.partition("=")[0] in conflict.keys[0]
    for word in words:
        assert word in str(conflict)
