"""Indexed heads, the selection of blocks and attention over them against their definitions."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DTYPES, Random, assert_close

from residency.runtime.kernels import selected_attention as attention
from residency.runtime.kernels.indexed_rotary import (
    Angles,
    IndexedCache,
    IndexedHeads,
    launch_prepare,
    prepare,
)
from residency.runtime.kernels.indexer import launch_score_blocks, score_blocks, select_mask
from residency.runtime.kernels.rotary import KeyValues

LENGTH = 64
BLOCK = 4


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "SPLITS", 4)
        monkeypatch.setattr(attention, "TILE", 16)
        monkeypatch.setattr(attention, "QUERY_TILE", 16)


def _heads(random: Random) -> IndexedHeads:
    norms = [random(n, std=0.3) for n in (32, 32, 16, 16)]
    return IndexedHeads(6, 2, 32, 4, 16, BLOCK, *norms, 1e-6)


def _angles(dtype: torch.dtype, device: torch.device) -> Angles:
    turns = torch.outer(torch.arange(LENGTH), 100.0 ** -(torch.arange(4) / 4)).repeat(1, 2)
    return Angles(turns.cos().to(device, dtype), turns.sin().to(device, dtype))


def _cache(random: Random, batch: int, indexed: bool = True) -> IndexedCache:
    kept = [random(batch, 2, LENGTH, 32) for _ in range(2)]
    if not indexed:
        return IndexedCache(*kept, None, None)
    return IndexedCache(*kept, random(batch, LENGTH, 16), random(batch, LENGTH // BLOCK, 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("begin", "steps"), [(0, 1), (6, 1), (7, 1), (5, 9), (51, 13)])
def test_heads_and_caches(begin: int, steps: int, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    heads, angles = _heads(random), _angles(dtype, device)
    row, cache = random(2, steps, heads.width), _cache(random, 2)
    other = IndexedCache(*(part.clone() for part in cache))
    at = torch.tensor(begin, device=device)
    got, want = (
        launch_prepare(row, heads, angles, cache, at), prepare(row, heads, angles, other, at)
    )  # fmt: skip
    for mine, theirs in zip((*got, *cache), (*want, *other), strict=True):
        assert_close(mine, theirs)


def test_no_index_is_written_where_there_is_none(device: torch.device) -> None:
    random = Random(torch.float32, device)
    heads, angles = _heads(random), _angles(torch.float32, device)
    row, cache = random(1, 3, heads.width), _cache(random, 1, indexed=False)
    other = IndexedCache(cache.keys.clone(), cache.values.clone(), None, None)
    at = torch.tensor(9, device=device)
    got = launch_prepare(row, heads, angles, cache, at)
    assert_close(got.attention, prepare(row, heads, angles, other, at).attention)
    assert_close(cache.keys, other.keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 2, 3, 40, 63])
def test_scores(position: int, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    q, blocks = random(2, 1, 4, 16), random(2, LENGTH // BLOCK, 16)
    want = score_blocks(q, blocks, position, BLOCK)
    got = launch_score_blocks(q, blocks, torch.tensor(position, device=device), BLOCK)
    torch.testing.assert_close(got, want)
    assert int((want > float("-inf")).sum()) == 2 * ((position + 1) // BLOCK)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 3, 30, 63])
@pytest.mark.parametrize("budget", [None, 1, 5])
def test_one_token(
    budget: int | None, position: int, dtype: torch.dtype, device: torch.device
) -> None:
    random = Random(dtype, device)
    q, row = random(2, 1, 6, 32), random(2, 1, _heads(random).width)
    kept = KeyValues(random(2, 2, LENGTH, 32), random(2, 2, LENGTH, 32))
    for part in kept:
        part[:, :, position + 1 :] = float("nan")  # must not be read
    selected = mask = None
    if budget is not None:
        index_q, blocks = random(2, 1, 4, 16), random(2, LENGTH // BLOCK, 16)
        selected = score_blocks(index_q, blocks, position, BLOCK)[:, 0].topk(budget).indices
        seen = blocks[:, : (position + 1) // BLOCK]
        mask = select_mask(index_q, seen, position, BLOCK, budget)
    at = torch.tensor(position, device=device)
    got = attention.launch_attend_step(q, row, kept, at, BLOCK, selected)
    want = attention.gated(attention.attend_selected(q, kept, position, BLOCK, mask), row)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("begin", "steps"), [(0, 20), (13, 37), (40, 24)])
def test_a_chunk(begin: int, steps: int, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    q = random(2, steps + 3, 6, 32)[:, 3:]
    kept = KeyValues(random(2, 2, LENGTH, 32), random(2, 2, LENGTH, 32))
    blocks = random(2, (begin + steps) // BLOCK, 16)
    mask = select_mask(random(2, steps, 4, 16), blocks, begin, BLOCK, 3)
    got = attention.launch_attend_chunk(q, kept, begin, BLOCK, mask)
    assert_close(got, attention.attend_selected(q, kept, begin, BLOCK, mask))
