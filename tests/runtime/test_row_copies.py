"""Row copies: each row arrives where it was to, whoever copies it."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residency.runtime.lanes import Lane, Mark
from residency.runtime.row_copies import Batched, ByKernel, OneByOne, driver_batch, runs, within

ROW_BYTES = 64
CPU = torch.device("cpu")


class NamedLane:
    handle = 7


@st.composite
def pairs(draw):
    sources = draw(st.lists(st.integers(0, 15), max_size=12))
    targets = draw(st.permutations(range(16)))[: len(sources)]
    return sources, targets


def filled(num_rows: int) -> torch.Tensor:
    rows = torch.arange(num_rows * ROW_BYTES, dtype=torch.int64) * 131 % 251
    return rows.to(torch.uint8).view(num_rows, ROW_BYTES)


def expected(origin, rows, sources, targets):
    want = rows.clone()
    for source, target in zip(sources, targets, strict=True):
        want[target] = origin[source]
    return want


@given(pairs())
def test_runs_are_the_pairs_cut_where_either_side_jumps(named):
    found = list(runs(*named))
    told = [(run.source + i, run.target + i) for run in found for i in range(run.length)]
    assert told == list(zip(*named, strict=True))
    for run, following in itertools.pairwise(found):
        ends = run.source + run.length, run.target + run.length
        assert ends != (following.source, following.target)


@given(pairs())
def test_one_by_one(named):
    origin, rows = filled(16), torch.zeros(16, ROW_BYTES, dtype=torch.uint8)
    want = expected(origin, rows, *named)
    OneByOne(rows, Lane(CPU, [])).issue(origin, *named)
    assert torch.equal(rows, want)


@given(pairs())
def test_a_batch_names_the_addresses_of_its_rows_and_its_stream(named):
    origin, rows = filled(16), torch.zeros(16, ROW_BYTES, dtype=torch.uint8)
    want = expected(origin, rows, *named)
    streams = []

    def batch(into, out_of, sizes, stream):
        streams.append(stream)
        for copy in zip(into, out_of, sizes, strict=True):
            ctypes.memmove(*copy)
        return 0

    Batched(rows, NamedLane(), batch).issue(origin, *named)
    assert torch.equal(rows, want)
    assert streams == ([NamedLane.handle] if named[0] else [])  # one call, or none


def test_a_batch_that_the_driver_refuses_is_an_error():
    rows = torch.zeros(4, ROW_BYTES, dtype=torch.uint8)
    copies = Batched(rows, NamedLane(), lambda into, out_of, sizes, stream: 719)
    with pytest.raises(RuntimeError, match="CUDA error 719: 2 copies were refused"):
        copies.issue(filled(4), [0, 2], [1, 3])


@given(pairs())
def test_words_are_whole_rows(named):
    rows = filled(32)
    sources, targets = named[0], [target + 16 for target in named[1]]
    want = expected(rows, rows, sources, targets)
    ByKernel(rows, Lane(CPU, [])).issue(rows, sources, targets)
    assert torch.equal(rows, want)


def test_on_the_cpu_rows_are_copied_run_by_run():
    rows = filled(4)
    assert isinstance(within(rows, Lane(CPU, [])), OneByOne)


@pytest.mark.gpu
@pytest.mark.parametrize("named", [([3], [0]), ([5, 6, 1, 9], [0, 1, 2, 8]), ([], [])])
def test_the_driver_and_the_kernel_copy_what_single_copies_do(named):
    device = torch.device("cuda")
    lane = Lane(device, [])
    origin = torch.randint(0, 256, (16, 1 << 20), dtype=torch.uint8).pin_memory()
    rows = torch.zeros(32, 1 << 20, dtype=torch.uint8, device=device)
    batch = driver_batch(device)
    if batch is not None:
        with lane.copying(Mark()) as done:
            Batched(rows, lane, batch).issue(origin, *named)
        assert done.seconds() >= 0
        assert torch.equal(rows.cpu(), expected(origin, torch.zeros_like(rows.cpu()), *named))
    torch.cuda.synchronize()
    rows.copy_(torch.randint_like(rows, 256))
    want = expected(rows.cpu(), rows.cpu(), named[0], [target + 16 for target in named[1]])
    torch.cuda.synchronize()
    with lane.copying(Mark()) as done:
        ByKernel(rows, lane).issue(rows, named[0], [target + 16 for target in named[1]])
    done.seconds()
    assert torch.equal(rows.cpu(), want)
