"""Chances: close to what really happens, whatever the popularity and the likeness of neighbours."""

import numpy as np
import pytest
import torch

from residency.policies.step import IdSpace
from residency.runtime.chances import Chances

SPACE = IdSpace(num_layers=1, num_experts=64, top_k=4)


def draw(rng, weights, num_tokens, sticky):
    """Routes int64 [T, K]; a token repeats the one before with probability `sticky`."""
    rows = []
    for _ in range(num_tokens):
        if rows and rng.random() < sticky:
            rows.append(rows[-1])
        else:
            rows.append(rng.choice(64, 4, replace=False, p=weights))
    return torch.tensor(np.array(rows))


def chunks(rng, weights, num_tokens, sticky, count):
    for _ in range(count):
        ids = draw(rng, weights, num_tokens, sticky)
        yield ids, torch.bincount(ids.flatten(), minlength=64) > 0


@pytest.mark.parametrize("sticky", [0.0, 0.7])
@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [4, 16])
def test_they_come_true(num_tokens, skew, sticky):
    rng = np.random.default_rng(0)
    weights = (1 + np.arange(64)) ** -skew
    weights /= weights.sum()
    chances = Chances(SPACE)
    for ids, routed in chunks(rng, weights, num_tokens, sticky, 300):
        chances.learn(0, ids, int(routed.sum()))
    told, came = [], []
    for _, routed in chunks(rng, weights, num_tokens, sticky, 300):
        told.append(chances.of(0, num_tokens, None))
        came.append(routed)
    told, came = torch.stack(told), torch.stack(came).double()
    assert told.sum() / came.sum() == pytest.approx(1, abs=0.1)
    likely = told > told.median()
    assert told[likely].mean() == pytest.approx(float(came[likely].mean()), abs=0.08)
    if skew:
        assert came[likely].mean() > 1.5 * came[~likely].mean()


def test_before_any_chunk_all_are_alike():
    chance = Chances(SPACE).of(0, 1, None)
    assert chance.tolist() == pytest.approx([4 / 64] * 64)
    assert Chances(SPACE).cycle(1) == pytest.approx(4)


@pytest.mark.parametrize("right", [0.9, 0.5])
def test_a_guess_counts_for_as_much_as_it_was_right(right):
    rng = np.random.default_rng(1)
    chances = Chances(SPACE)
    for _ in range(200):
        routed = rng.permutation(64)[:16]
        named = np.concatenate(
            [routed[: int(16 * right)], rng.permutation(64)[: 16 - int(16 * right)]]
        )
        guess = torch.bincount(torch.from_numpy(named), minlength=64)
        chance = chances.of(0, 4, guess)
        chances.learn(0, torch.from_numpy(routed.reshape(4, 4)), 16)
    named = guess > 0
    assert chance[named].mean() == pytest.approx(right + (1 - right) / 4, abs=0.12)
    assert chance[~named].mean() < 0.5 * chance[named].mean()
    assert (chance <= 1).all()
    assert (chance >= 0).all()
