"""Listed rows are copied whole, all others keep their bytes."""

from __future__ import annotations

import pytest
import torch

from residency.runtime.kernels.gather import GatherConfig, gather, launch_gather


@pytest.mark.parametrize("num_copies", [0, 1, 5])
@pytest.mark.parametrize("row_bytes", [64, 192, 4096 + 64])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_gather(num_copies: int, row_bytes: int, on_host: bool, device: torch.device) -> None:
    bank = torch.randint(0, 255, (9, row_bytes), dtype=torch.uint8)
    rows = torch.randint(0, 255, (7, row_bytes), dtype=torch.uint8).to(device)
    if device.type == "cuda":
        bank = bank.pin_memory() if on_host else bank.to(device)
    expert = torch.randperm(9)[:6].int().to(device)
    slot = torch.randperm(7)[:6].int().to(device)
    expert[num_copies:], slot[num_copies:] = -1, -1
    num = torch.tensor([num_copies], dtype=torch.int32, device=device)
    want = rows.clone()
    gather(bank.to(device), want, expert, slot, num)
    assert num_copies == 0 or not torch.equal(want, rows)
    launch_gather(bank, rows, expert, slot, num, GatherConfig(5, 1024, 4))
    assert torch.equal(rows, want)


def test_row_sizes_must_agree(device: torch.device) -> None:
    lists = torch.zeros(1, dtype=torch.int32, device=device)
    bank = torch.zeros(2, 64, dtype=torch.uint8)
    rows = torch.zeros(2, 128, dtype=torch.uint8, device=device)
    with pytest.raises(AssertionError, match="64 B, device row 128 B"):
        launch_gather(bank, rows, lists, lists, lists)
