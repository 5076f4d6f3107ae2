"""Runs the kernels on the device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import sys

import pytest
import torch

# Triton reads this when it is imported, so whoever imports it first must have set it.
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError("kernel tests without a GPU need TRITON_INTERPRET=1 from the start")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
