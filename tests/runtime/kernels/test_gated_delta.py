"""The gated delta rule and the short convolution, by kernels and in blocks, token by token."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DTYPES, TOLERANCE, Random, assert_close

from residency.runtime.kernels import gated_delta_chunk as chunked
from residency.runtime.kernels.gated_delta import DeltaHeads, delta_step, launch_delta_step
from residency.runtime.kernels.short_conv import launch_short_conv, short_conv


def _heads(random: Random, silu: bool = True) -> DeltaHeads:
    return DeltaHeads(1, 2, 16, 32, random(2), random(2), random(32), 1e-6, silu)


def _inputs(random: Random, heads: DeltaHeads, batch: int, steps: int):
    mixed = random(batch, steps, heads.width)
    n = heads.num_values * heads.value_dim + 2 * heads.num_values
    gates = random(batch, steps, 7 + n)[..., 7:]  # columns of a wider row
    state = torch.randn(batch, 2, 16, 32, generator=random.rng).to(mixed.device)
    return mixed, gates, state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("silu", [True, False])
def test_one_token(silu: bool, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    heads = _heads(random, silu)
    mixed, gates, state = _inputs(random, heads, 2, 1)
    other = state.clone()
    got = launch_delta_step(mixed, gates, state, heads)
    assert_close(got, delta_step(mixed, gates, other, heads))
    assert (state - other).norm() / other.norm() < TOLERANCE[dtype]  # beta is rounded to it


@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (1, 64), (2, 70)])
def test_blocks_equal_single_tokens(
    batch: int, steps: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across spans, which share working memory."""
    monkeypatch.setattr(chunked, "SPAN", 64)
    random = Random(torch.float32, device)
    heads = _heads(random)
    mixed, gates, state = _inputs(random, heads, batch, steps)
    states = [state.clone() for _ in range(2)]
    want = delta_step(mixed, gates, state, heads)
    limit = 1e-5 if device.type == "cpu" else 1e-4  # three products of TF32 stand for one
    for own, form in zip(states, (chunked.delta_chunk, chunked.launch_delta_chunk), strict=True):
        assert_close(form(mixed, gates, own, heads), want, limit)
        assert_close(own, state, limit)


def test_blocks_in_bf16(device: torch.device) -> None:
    random = Random(torch.bfloat16, device)
    heads = _heads(random)
    mixed, gates, state = _inputs(random, heads, 1, 70)
    other = state.clone()
    got = chunked.launch_delta_chunk(mixed, gates, state, heads)
    assert_close(got, delta_step(mixed, gates, other, heads))
    error = (state - other).norm() / other.norm()
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "dilation"), [(4, 1), (3, 1), (9, 3)])
@pytest.mark.parametrize("steps", [1, 2, 8, 21])
def test_convolution(
    steps: int, length: int, dilation: int, dtype: torch.dtype, device: torch.device
) -> None:
    random = Random(dtype, device)
    x = random(2, steps, 300)[..., :270]  # columns of a wider row
    state, weight = random(2, 270, length), random(270, 4)
    other = state.clone()
    got = launch_short_conv(x, state, weight, dilation)
    assert_close(got, short_conv(x, other, weight, dilation))
    assert torch.equal(state, other)


def test_a_convolution_goes_on_where_it_stopped(device: torch.device) -> None:
    random = Random(torch.float32, device)
    x, weight = random(1, 30, 20), random(20, 4)
    whole = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=9, dilation=3, groups=20)[
        ..., :30
    ]
    state = torch.zeros(1, 20, 9, device=device)
    parts = [launch_short_conv(part, state, weight, 3) for part in x.split([13, 1, 1, 15], 1)]
    assert_close(torch.cat(parts, 1), torch.nn.functional.silu(whole.mT))
