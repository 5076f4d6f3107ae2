"""Going back in a sequence: layers that can be cut are cut, of the others there are snapshots.

Nothing is erased by a cut. Keys and values behind the new length stay where they are until newer
ones are stored over them, and no attention reads them before. All tensors stay in their places,
so graphs that were captured stay valid.
"""

from __future__ import annotations

from typing import Any

import torch

from residency.runtime.cache_sizes import can_cut
from residency.runtime.kept import copied_state, put_state_back
from residency.runtime.sequence import Sequence


class Snapshot:
    """One moment of a sequence: copies of the layers that cannot be cut back to it.

    num_tokens: what the sequence held. num_bytes: of the copies.
    """

    @torch.inference_mode()
    def __init__(self, sequence: Sequence) -> None:
        self.num_tokens = sequence.runtime.position
        self._layers = [
            None if can_cut(layer) else copied_state(vars(layer)) for layer in sequence.cache.layers
        ]

    @property
    def num_bytes(self) -> int:
        return sum(_bytes(state) for state in self._layers if state is not None)

    @torch.inference_mode()
    def put_back(self, sequence: Sequence) -> None:
        """The sequence, which has held at least as much since, is at this moment again."""
        for layer, state in zip(sequence.cache.layers, self._layers, strict=True):
            if state is None:
                _cut(layer, self.num_tokens)
            else:
                put_state_back(state, vars(layer))
        sequence.held = sequence.runtime.position = self.num_tokens


@torch.inference_mode()
def cut_back(sequence: Sequence, num_tokens: int) -> None:
    """Forget all tokens but the first so many."""
    assert sequence.can_cut and num_tokens <= sequence.held, "it cannot be cut back to that"
    for layer in sequence.cache.layers:
        _cut(layer, num_tokens)
    sequence.held = sequence.runtime.position = num_tokens


def _cut(layer: Any, num_tokens: int) -> None:
    layer.cumulative_length.fill_(num_tokens)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = num_tokens
    if (indexed := getattr(layer, "indexer_cumulative_length", None)) is not None:
        indexed.fill_(num_tokens)
    if (positions := getattr(layer, "indexer_position_ids", None)) is not None:
        layer.indexer_position_ids = positions[..., :num_tokens].clone()


def _bytes(state: dict[Any, Any]) -> int:
    total = 0
    for value in state.values():
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            total += _bytes(value)
    return total
