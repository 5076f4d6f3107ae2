"""Kept tokens: what a sequence's cache holds at one moment, copied, so that it can be had again.

A conversation's next turn begins there. Layers of attention could be cut back to a shorter length,
but a window has dropped its oldest tokens and a recurrent state cannot be undone, so all is copied.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from residency.policies.errors import WorkloadError
from residency.runtime.sequence import Sequence


class Kept:
    """The tokens that one sequence held. num_tokens: how many."""

    @torch.inference_mode()
    def __init__(self, sequence: Sequence | None) -> None:
        """Raises WorkloadError where there is nothing."""
        if sequence is None or sequence.held == 0:
            raise WorkloadError("there is nothing to keep: no generation of one sequence has ended")
        self.num_tokens = sequence.held
        self._sequence = weakref.ref(sequence)  # its memory may go before this
        self._layers = [copied_state(vars(layer)) for layer in sequence.cache.layers]

    @torch.inference_mode()
    def put_back(self, sequence: Sequence | None) -> None:
        """The sequence holds them again, in the same tensors: captured graphs stay valid.

        Raises WorkloadError for another sequence.
        """
        if sequence is None or self._sequence() is not sequence:
            raise WorkloadError(
                "the sequence of the kept tokens is gone: a longer one or another combination "
                "took its place; begin it again, with room for what follows"
            )
        for layer, kept in zip(sequence.cache.layers, self._layers, strict=True):
            put_state_back(kept, vars(layer))
        sequence.held = sequence.runtime.position = self.num_tokens


def check_continued(sequence: Sequence | None, num_prompts: int, num_tokens: int) -> None:
    """Raises WorkloadError where no prompt can follow on what `sequence` holds.

    num_tokens: of what it holds, the prompt and its answer.
    """
    if num_prompts > 1:
        raise WorkloadError(f"{num_prompts} prompts at once cannot continue one sequence; give one")
    if sequence is None or sequence.held == 0:
        raise WorkloadError(
            "there is nothing to continue: no generation of one sequence has ended, or the last "
            "one broke off; begin one"
        )
    if num_tokens > sequence.capacity:
        raise WorkloadError(
            f"{num_tokens} tokens with those that are continued, and their sequence has room for "
            f"{sequence.capacity}; begin it with room={num_tokens}"
        )


def copied_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """The tensors, the tables of them, and the numbers of a cache's layer."""
    copies: dict[Any, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            copies[name] = value.clone()
        elif isinstance(value, dict):
            copies[name] = copied_state(value)
        elif value is None or isinstance(value, int):
            copies[name] = value
    return copies


def put_state_back(copies: dict[Any, Any], state: dict[Any, Any]) -> None:
    """Into the tensors that are there; those that grow with the sequence are made anew."""
    for name, kept in copies.items():
        now = state[name]
        if isinstance(kept, dict):
            put_state_back(kept, now)
        elif not isinstance(kept, torch.Tensor):
            state[name] = kept
        elif isinstance(now, torch.Tensor) and now.shape == kept.shape:
            now.copy_(kept)
        else:
            state[name] = kept.clone()
