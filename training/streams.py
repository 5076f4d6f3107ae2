"""Training windows drawn from the encoded domains.

A domain is one long stream of tokens. Each pass over it starts at a new random offset and reads the
windows in a new random order, so every token is seen once a pass, at a different place. Small
domains are read a little more often than their size alone would have it. Half of the long windows
change domain every 2,048 tokens: this is what a long prompt with several subjects looks like, and
what makes the set of busy experts move.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIZE_EXPONENT = 0.75
SPAN = 2048
IGNORED = -100
Corpora = list[dict[str, Any]]


def load_corpora(data: Path) -> Corpora:
    corpora: Corpora = json.loads((data / "corpus.json").read_text())
    return corpora


class Windows:
    """Window starts of one domain at one length, without repeats inside a pass."""

    def __init__(self, first: int, tokens: int, length: int, rng: np.random.Generator) -> None:
        self.first, self.tokens, self.length, self.rng = first, tokens, length, rng
        self.starts: list[int] = []

    def next(self) -> int:
        if not self.starts:
            offset = int(self.rng.integers(self.length))
            starts = np.arange(offset, self.tokens - self.length + 1, self.length)
            self.starts = self.rng.permutation(starts + self.first).tolist()
        return self.starts.pop()


class Mixture:
    """Batches over all domains, from one array of tokens on the training device."""

    def __init__(self, data: Path, device: torch.device, seed: int) -> None:
        self.names = [c["name"] for c in load_corpora(data)]
        streams = [np.load(data / f"{name}.train.npy") for name in self.names]
        self.sizes = np.array([s.size for s in streams])
        self.tokens = torch.from_numpy(np.concatenate(streams).astype(np.int32)).to(device)
        self.rng = np.random.default_rng(seed)
        weights = self.sizes**SIZE_EXPONENT
        self.weights = weights / weights.sum()
        self.windows: dict[tuple[int, int], Windows] = {}

    def start(self, domain: int, length: int) -> int:
        key = (domain, length)
        if key not in self.windows:
            first = int(self.sizes[:domain].sum())
            self.windows[key] = Windows(first, int(self.sizes[domain]), length, self.rng)
        return self.windows[key].next()

    def row(self, length: int) -> list[int]:
        """Starts of the spans of one row, all the same length."""
        domains = self.rng.choice(len(self.names), size=-(-length // SPAN), p=self.weights)
        if len(domains) == 1 or self.rng.random() < 0.5:
            first = self.start(int(domains[0]), length)
            return [first + SPAN * i for i in range(len(domains))]
        return [self.start(int(d), SPAN) for d in domains]

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids and the ids that follow them."""
        starts = torch.tensor([self.row(length) for _ in range(rows)], device=self.tokens.device)
        inside = torch.arange(min(length, SPAN), device=self.tokens.device)
        ids = self.tokens[starts[:, :, None] + inside].flatten(1).long()
        targets = torch.roll(ids, -1, 1)
        targets[:, -1] = IGNORED
        return ids, targets


def heldout(data: Path, name: str, length: int, limit: int, rows: int) -> Iterator[Tensor]:
    """The first `limit` windows of a domain's held-out stream, a few rows at a time."""
    stream = np.load(data / f"{name}.heldout.npy").astype(np.int64)
    count = min(limit, stream.size // length)
    windows = torch.from_numpy(stream[: count * length].reshape(count, length))
    for first in range(0, count, rows):
        yield windows[first : first + rows]
