"""A batch: sequences of different lengths that are decoded together, one model step for all.

Each prompt is prefilled on its own, in the one sequence that a batch has for this, and then copied
into a row; so prefill does not depend on company, and what a single sequence can do (pieces that
are captured, windows, recurrent states) holds for each. A sequence that is done leaves: the last
row moves into its place and the next step has one row fewer, so nothing is fetched, computed or
counted for it any more. There is one captured decode step for each number of rows that occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from residency.runtime.batch_cache import BatchCache
from residency.runtime.sequence import DecodeStep, Sequence


class Batch:
    """Up to `num_rows` sequences; their cache is taken when the first one joins.

    masked: whether the model takes a mask; one whose kernels read each row's length needs none.
    """

    def __init__(self, sequence: Sequence, num_rows: int, *, masked: bool) -> None:
        self.sequence = sequence
        self.runtime = sequence.runtime
        self.num_rows = num_rows
        self.num_taken = 0
        self.steps: dict[int, DecodeStep] = {}  # by number of rows
        self._masked = masked
        self._cache: BatchCache | None = None
        self._pool: Any = None  # torch's handle

    @property
    def cache(self) -> BatchCache:
        if self._cache is None:
            self._cache = BatchCache.like(self.sequence.cache, self.num_rows)
        return self._cache

    def renew(self) -> None:
        """Capture the decode steps anew: slots have moved. What rows hold stays."""
        self.steps, self._pool = {}, None

    @property
    def num_bytes(self) -> int:
        """What the rows' cache has taken."""
        layers = [] if self._cache is None else self._cache.layers
        return sum(tensor.nbytes for layer in layers for tensor in layer.tensors())

    def clear(self) -> None:
        """No row is taken any more."""
        self.num_taken = 0
        self.sequence.clear()

    def restart(self) -> None:
        """The next chunk is the first of a prompt."""
        self.sequence.restart()

    def prefill(self, ids_1T: torch.Tensor, behind: int = 0) -> torch.Tensor:
        """Logits [V] behind the last of T tokens, int64 [1, T]."""
        return self.sequence.prefill(ids_1T, behind)

    def join(self) -> None:
        """The sequence that was prefilled takes the next row."""
        assert self.num_taken < self.num_rows, f"all {self.num_rows} rows are taken"
        self.cache.take(self.num_taken, self.sequence.cache, self.runtime.position)
        self.num_taken += 1

    def decode(self, ids_B1: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] behind one token of each row, int64 [B, 1]; the next step overwrites."""
        num_rows = len(ids_B1)
        assert num_rows == self.num_taken, f"{num_rows} tokens for {self.num_taken} sequences"
        if num_rows not in self.steps:
            if self.runtime.capturable and self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            forward = self._forward(self.cache.first(num_rows))
            self.steps[num_rows] = DecodeStep(self.runtime, forward, self._pool)
        return self.steps[num_rows](ids_B1)

    def leave(self, row: int) -> None:
        """The sequence in `row` is done; the last row takes its place."""
        self.num_taken -= 1
        if row < self.num_taken:
            self.cache.move(self.num_taken, row)

    def finish(self) -> None:
        """See `Rows`; rows cannot be continued."""

    def _forward(self, cache: BatchCache) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model over one token of each of these rows."""
        model: Any = self.sequence.model
        eager = model.config.get_text_config()._attn_implementation == "eager"
        additive = model.dtype if eager else None

        def forward(ids_B1: torch.Tensor) -> torch.Tensor:
            output = model(
                ids_B1,
                attention_mask=cache.mask(additive) if self._masked else None,
                position_ids=cache.positions_B[:, None].clone(),
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache.positions_B.add_(1)
            logits_BV: torch.Tensor = output.logits[:, -1]
            return logits_BV

        return forward
