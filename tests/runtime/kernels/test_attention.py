"""Rotary, cache writes and decode attention against their definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from residency.runtime.kernels import attention, rotary
from residency.runtime.kernels.attention import AttendConfig, Scratch
from residency.runtime.kernels.rotary import HeadNorms, KeyValues

# Triton's interpreter cuts off what does not fit bf16 instead of rounding it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if torch.cuda.is_available() else 4e-2}
DTYPES = [torch.float32, torch.bfloat16]
SMALL = AttendConfig(4, 16, 4, 1)


@dataclass(frozen=True)
class Case:
    """Random heads of some sequences, and caches with garbage behind the position."""

    qkv_BSW: Tensor
    norms: HeadNorms
    cos: Tensor
    sin: Tensor
    cache: KeyValues
    position: Tensor

    def copy(self) -> Case:
        cache = KeyValues(*(t.clone() for t in self.cache))
        return replace(self, cache=cache, position=self.position.clone())


def _case(
    batch: int,
    steps: int,
    heads: tuple[int, int, int],
    position: int,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int = 80,
    position_dtype: torch.dtype = torch.int64,
) -> Case:
    num_q, num_kv, dim = heads
    rng = torch.Generator().manual_seed(batch * 1000 + steps * 100 + position)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    angles = torch.rand(1, steps, dim // 2, generator=rng).repeat(1, 1, 2) * 6
    return Case(
        random(batch, steps, (num_q + 2 * num_kv) * dim),
        HeadNorms(random(dim), random(dim), 1e-6),
        angles.cos().to(dtype).to(device),
        angles.sin().to(dtype).to(device),
        KeyValues(random(batch, num_kv, max_length, dim), random(batch, num_kv, max_length, dim)),
        torch.tensor(position, dtype=position_dtype, device=device),
    )


def _assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.2e}"


def _assert_same_cache(got: KeyValues, want: KeyValues, begin: int, end: int) -> None:
    for mine, theirs in zip(got, want, strict=True):
        _assert_close(mine[:, :, begin:end], theirs[:, :, begin:end])
        assert torch.equal(mine[:, :, :begin], theirs[:, :, :begin])
        assert torch.equal(mine[:, :, end:], theirs[:, :, end:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 16), (3, 1, 32), (5, 5, 16)], ids=str)
@pytest.mark.parametrize("extents", [(1, 7, 0), (2, 3, 9), (1, 1, 79)], ids=str)
def test_rotate_and_store(
    extents: tuple[int, int, int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    batch, steps, position = extents
    case = _case(batch, steps, heads, position, dtype, device)
    other = case.copy()
    want = rotary.rotate_and_store(*vars(case).values())
    got = rotary.launch_rotate_and_store(*vars(other).values())
    _assert_close(got, want)
    _assert_same_cache(other.cache, case.cache, position, position + steps)
    assert int(other.position) == position


@pytest.mark.parametrize(("position", "rows"), [(0, 5), (9, 7), (75, 5)])
def test_padding_tokens_are_not_stored(position: int, rows: int, device: torch.device) -> None:
    case = _case(1, 7, (8, 2, 16), position, torch.float32, device)
    other = case.copy()
    real, out = torch.tensor(rows, device=device), torch.empty(1, 7, 8, 16, device=device)
    want = rotary.rotate_and_store(*vars(case).values(), rows=real)
    got = rotary.launch_rotate_and_store(*vars(other).values(), rows=real, out=out)
    assert got is out
    _assert_close(got, want)
    _assert_same_cache(other.cache, case.cache, position, position + rows)


def _attend(case: Case, scratch: Scratch | None = None) -> Tensor:
    return attention.launch_attend_one(
        case.qkv_BSW[:, 0].contiguous(),
        case.norms,
        case.cos[:, 0],
        case.sin[:, 0],
        case.cache,
        case.position,
        scratch,
        SMALL,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 16), (3, 1, 32), (5, 5, 16)], ids=str)
@pytest.mark.parametrize("extents", [(1, 0), (1, 15), (2, 16), (1, 64), (3, 79)], ids=str)
def test_attend_one(
    extents: tuple[int, int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    batch, position = extents
    case = _case(batch, 1, heads, position, dtype, device)
    other = case.copy()
    for cache in other.cache:  # what lies behind the position may be anything
        cache[:, :, position + 1 :] = float("nan")
        case.cache[0][:, :, position + 1 :] = case.cache[1][:, :, position + 1 :] = 0
    want = attention.attend_one(
        case.qkv_BSW[:, 0], case.norms, case.cos[:, 0], case.sin[:, 0], case.cache, case.position
    )
    got = _attend(other)
    _assert_close(got, want)
    assert int(other.position) == int(case.position) == position + 1
    for cache in (*other.cache, *case.cache):
        cache[:, :, position + 1 :] = 0
    _assert_same_cache(other.cache, case.cache, position, position + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_with_one_scratch(dtype: torch.dtype, device: torch.device) -> None:
    heads = (4, 2, 16)
    case = _case(2, 1, heads, 30, dtype, device, position_dtype=torch.int32)
    other = case.copy()
    scratch = Scratch.empty(3, heads[0], other.cache, SMALL)
    for step in range(4):
        qkv = _case(2, 1, heads, step, dtype, device).qkv_BSW
        want = attention.attend_one(
            qkv[:, 0], case.norms, case.cos[:, 0], case.sin[:, 0], case.cache, case.position
        )
        _assert_close(_attend(replace(other, qkv_BSW=qkv), scratch), want)
        assert not scratch.arrivals.any()
    assert int(other.position) == 34


def test_a_sequence_does_not_depend_on_its_company(device: torch.device) -> None:
    case = _case(3, 1, (8, 2, 16), 50, torch.float32, device)
    together = _attend(case.copy())
    for i in range(3):
        alone = replace(
            case.copy(),
            qkv_BSW=case.qkv_BSW[i : i + 1],
            cache=KeyValues(*(t[i : i + 1].clone() for t in case.cache)),
        )
        assert torch.equal(_attend(alone)[0], together[i])


RAGGED = {1: [7], 2: [0, 33], 5: [79, 0, 15, 16, 64], 8: [3, 70, 0, 15, 31, 32, 48, 79]}


def _ragged(positions: list[int], dtype: torch.dtype, device: torch.device) -> Case:
    """Sequences each of a length and angles of its own, garbage behind each one's end."""
    case = _case(len(positions), 1, (8, 2, 16), max(positions), dtype, device)
    angles = torch.rand(len(positions), 1, 8, generator=torch.Generator().manual_seed(1))
    angles = angles.repeat(1, 1, 2) * 6
    for cache in case.cache:
        for row, position in enumerate(positions):
            cache[row, :, position + 1 :] = float("nan")
    return replace(
        case,
        cos=angles.cos().to(dtype).to(device),
        sin=angles.sin().to(dtype).to(device),
        position=torch.tensor(positions, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positions", RAGGED.values(), ids=RAGGED)
def test_each_sequence_at_its_own_position(
    positions: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    """As its definition says; and bit for bit as if it were alone."""
    case = _ragged(positions, dtype, device)
    other = case.copy()
    want = attention.attend_one(
        case.qkv_BSW[:, 0], case.norms, case.cos[:, 0], case.sin[:, 0], case.cache, case.position
    )
    scratch = Scratch.empty(len(positions), 8, other.cache, SMALL)
    got = _attend(other, scratch)
    _assert_close(got, want)
    assert not scratch.arrivals.any()
    assert other.position.tolist() == case.position.tolist() == [p + 1 for p in positions]
    for mine, theirs in zip(other.cache, case.cache, strict=True):
        for row, position in enumerate(positions):
            _assert_close(mine[row, :, : position + 1], theirs[row, :, : position + 1])
            assert mine[row, :, position + 1 :].isnan().all()
    for row in range(len(positions)):
        alone = _ragged(positions, dtype, device)
        own = replace(
            alone,
            qkv_BSW=alone.qkv_BSW[row : row + 1],
            cos=alone.cos[row : row + 1],
            sin=alone.sin[row : row + 1],
            cache=KeyValues(*(t[row : row + 1].clone() for t in alone.cache)),
            position=alone.position[row],
        )
        assert torch.equal(_attend(own)[0], got[row])


def test_chosen_config(device: torch.device) -> None:
    case = _case(1, 1, (8, 1, 128), 40, torch.bfloat16, device)
    other = case.copy()
    args = (case.qkv_BSW[:, 0], case.norms, case.cos[:, 0], case.sin[:, 0])
    want = attention.attend_one(*args, case.cache, case.position)
    _assert_close(attention.launch_attend_one(*args, other.cache, other.position), want)
