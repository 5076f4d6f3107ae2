"""Hyper-connections, the shared expert and n-gram gates against their definitions."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DTYPES, Random, assert_close

from residency.runtime.kernels.hyper import Mixer, Streams, launch_mix, mix
from residency.runtime.kernels.lexical import Gate, gate_values, launch_gate_values
from residency.runtime.kernels.shared_expert import launch_shared_expert, shared_expert
from residency.runtime.kernels.table_rows import launch_table_rows, table_rows

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 11])
@pytest.mark.parametrize(("streams", "hidden", "rank"), [(4, 40, 12), (3, 32, 16)])
def test_mixing(
    streams: int, hidden: int, rank: int, rows: int, pending: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    random = Random(dtype, device)
    size = streams * hidden
    mixer = Mixer(
        streams, random(size, std=0.3), EPS, random(rank + streams, size, std=size**-0.5),
        random(size, rank),
    )  # fmt: skip
    wide = random(rows, rank + streams)  # the raw strengths are columns of a wider row
    waiting = (random(rows, hidden), wide[:, rank:]) if pending else ()
    state = Streams(random(rows, size) * 3, *waiting)
    got, want = launch_mix(state, mixer), mix(state, mixer)
    for mine, other in zip(got, want, strict=True):
        assert mine is not None and other is not None
        assert_close(mine, other)
    last = mixer._replace(down_WC=mixer.down_WC[:rank].contiguous())
    assert launch_mix(state, last).inject_RS is None
    assert_close(launch_mix(state, last).x_RH, want.x_RH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_shared_expert(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    row, down = random(rows, 9 + 2 * 24 + 1), random(40, 24, std=0.2)
    assert_close(launch_shared_expert(row, down), shared_expert(row, down))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_values(dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    gate = Gate(4, *(random(4 * 40, std=0.3) for _ in range(3)), EPS)
    row, streams = random(5, 5 * 40), random(5, 4 * 40)
    for mine, other in zip(
        launch_gate_values(row, streams, gate), gate_values(row, streams, gate), strict=True
    ):
        assert_close(mine, other)


def test_rows_of_a_table(device: torch.device) -> None:
    table = torch.randn(13, 20, dtype=torch.bfloat16)
    if device.type == "cuda":
        table = table.pin_memory()
    ids = torch.tensor([[0, 12, 13], [27, 5, 1 << 40]], device=device)
    got = launch_table_rows(table, ids)
    assert torch.equal(got, table_rows(table, ids))
    want = [[0, 12, 0], [1, 5, (1 << 40) % 13]]
    assert torch.equal(got.cpu(), table[torch.tensor(want)])
