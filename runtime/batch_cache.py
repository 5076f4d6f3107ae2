"""Keys, values and states of several sequences: a row each, at a length of its own.

transformers' static cache has one length for all its rows. Here a layer's new keys and values go
to each row's own place, and a mask made from the rows' lengths says what a row may attend to, so
nothing is padded. Rows are filled from static caches of one sequence. Shapes are fixed and no
operation waits for the device, so that a decode step over the first rows can be captured.

Legend: B rows, H heads, L places, D head dim.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import (
    Cache,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from residency.policies.errors import ConfigError

Mask = Tensor | dict[str, Tensor | None] | None


class RowLayer(Protocol):
    """One layer's part of every row. kind: as a config's `layer_types` calls such a layer."""

    kind: ClassVar[str]

    def tensors(self) -> list[Tensor]:
        """All that a row consists of, rows first."""

    def first(self, num_rows: int) -> RowLayer:
        """The same layer with the first rows alone, in the same memory."""

    def take(self, row: int, one: Any, length: int) -> None:
        """Take over the `length` tokens that layer `one` of a single sequence's cache holds."""

    def visible(self, positions_B: Tensor) -> Tensor | None:
        """bool [B, L]: what a row may attend to when its next token, at its position, is stored."""


class AttentionRows(StaticLayer):  # type: ignore[misc]
    """Keys and values of a layer that attends to all tokens before."""

    kind: ClassVar[str] = "full_attention"

    def __init__(self, keys_BHLD: Tensor, values_BHLD: Tensor, lengths_B: Tensor) -> None:
        super().__init__(max_cache_len=keys_BHLD.shape[2])
        self.keys, self.values = keys_BHLD, values_BHLD
        self.cumulative_length = lengths_B  # the kernels' name for it is transformers'
        self.batch_size, self.num_heads = keys_BHLD.shape[:2]
        self.device = keys_BHLD.device
        self.is_initialized = True
        self._rows_B = torch.arange(self.batch_size, device=self.device)

    @classmethod
    def like(cls, one: StaticLayer, num_rows: int) -> Self:
        keys, values = (t.new_zeros(num_rows, *t.shape[1:]) for t in (one.keys, one.values))
        return cls(keys, values, one.cumulative_length.new_zeros(num_rows))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token a row, [B, H, 1, D] twice; all keys and values."""
        places_B = self._place(self.cumulative_length)
        self.keys[self._rows_B, :, places_B] = key_states[:, :, 0]
        self.values[self._rows_B, :, places_B] = value_states[:, :, 0]
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def _place(self, positions_B: Tensor) -> Tensor:
        return positions_B

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values, self.cumulative_length]

    def first(self, num_rows: int) -> Self:
        return type(self)(*(tensor[:num_rows] for tensor in self.tensors()))

    def take(self, row: int, one: StaticLayer, length: int) -> None:
        for mine, theirs in ((self.keys, one.keys), (self.values, one.values)):
            mine[row, :, :length].copy_(theirs[0, :, :length])
        self.cumulative_length[row] = length

    def visible(self, positions_B: Tensor) -> Tensor:
        places_L = torch.arange(self.max_cache_len, device=positions_B.device)
        visible_BL: Tensor = places_L <= positions_B[:, None]
        return visible_BL


class SlidingRows(AttentionRows):
    """A ring: the token at position p lies in place p modulo L, the window's length.

    Keys are turned by their position before they are stored, so their order does not matter. A
    window that is full is visible as a whole, for the new token has taken the oldest one's place.
    """

    kind: ClassVar[str] = "sliding_attention"

    def _place(self, positions_B: Tensor) -> Tensor:
        places_B: Tensor = positions_B % self.max_cache_len
        return places_B

    def take(self, row: int, one: StaticSlidingWindowLayer, length: int) -> None:
        """`one` holds the last L tokens in order, or all of them where there are fewer."""
        shift = length % self.max_cache_len if length > self.max_cache_len else 0
        for mine, theirs in ((self.keys, one.keys), (self.values, one.values)):
            mine[row].copy_(theirs[0].roll(shift, dims=1))
        self.cumulative_length[row] = length


class StateRows(LinearAttentionLayer):  # type: ignore[misc]
    """The states of a recurrent layer, which has no places and needs no mask."""

    kind: ClassVar[str] = "linear_attention"

    def __init__(
        self,
        kernel_sizes: dict[int, int],
        conv_states: dict[int, Tensor | None],
        recurrent_states: dict[int, Tensor | None],
    ) -> None:
        super().__init__(number_of_states=len(conv_states))
        self.conv_kernel_size = kernel_sizes
        self.conv_states, self.recurrent_states = conv_states, recurrent_states
        self.is_conv_states_initialized = {i: s is not None for i, s in conv_states.items()}
        self.is_recurrent_states_initialized = {
            i: s is not None for i, s in recurrent_states.items()
        }
        self.has_previous_state = dict.fromkeys(conv_states, True)
        like = self.tensors()[0]
        self.dtype, self.device = like.dtype, like.device

    @classmethod
    def like(cls, one: LinearAttentionLayer, num_rows: int) -> Self:
        return cls(
            dict(one.conv_kernel_size),
            _each(one.conv_states, lambda t: t.new_zeros(num_rows, *t.shape[1:])),
            _each(one.recurrent_states, lambda t: t.new_zeros(num_rows, *t.shape[1:])),
        )

    def tensors(self) -> list[Tensor]:
        both = [*self.conv_states.values(), *self.recurrent_states.values()]
        return [state for state in both if state is not None]

    def first(self, num_rows: int) -> Self:
        return type(self)(
            self.conv_kernel_size,
            _each(self.conv_states, lambda t: t[:num_rows]),
            _each(self.recurrent_states, lambda t: t[:num_rows]),
        )

    def take(self, row: int, one: LinearAttentionLayer, length: int) -> None:
        theirs = [*one.conv_states.values(), *one.recurrent_states.values()]
        for mine, state in zip(self.tensors(), (t for t in theirs if t is not None), strict=True):
            mine[row].copy_(state[0])

    def visible(self, positions_B: Tensor) -> None:
        return None


def _each(states: dict[int, Tensor | None], change: Any) -> dict[int, Tensor | None]:
    return {i: None if state is None else change(state) for i, state in states.items()}


ROWS: dict[type, Any] = {
    StaticLayer: AttentionRows,
    StaticSlidingWindowLayer: SlidingRows,
    LinearAttentionLayer: StateRows,
}


class BatchCache(Cache):  # type: ignore[misc]
    """All layers' rows. positions_B: int64, tokens that each row holds."""

    def __init__(self, layers: list[RowLayer], positions_B: Tensor) -> None:
        super().__init__(layers=layers)
        self.positions_B = positions_B

    @classmethod
    def like(cls, one: StaticCache, num_rows: int) -> BatchCache:
        """Empty rows of the shapes in `one`, a cache that holds a sequence of the same model."""
        layers = [ROWS[type(layer)].like(layer, num_rows) for layer in one.layers]
        device = layers[0].tensors()[0].device
        return cls(layers, torch.zeros(num_rows, dtype=torch.int64, device=device))

    def first(self, num_rows: int) -> BatchCache:
        """The first rows alone, in the same memory."""
        layers = [layer.first(num_rows) for layer in self.layers]
        return BatchCache(layers, self.positions_B[:num_rows])

    def take(self, row: int, one: StaticCache, length: int) -> None:
        """Row `row` becomes the sequence of `length` tokens in `one`."""
        for mine, theirs in zip(self.layers, one.layers, strict=True):
            mine.take(row, theirs, length)
        self.positions_B[row] = length

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is."""
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor[target].copy_(tensor[source])
        self.positions_B[target].copy_(self.positions_B[source])

    def mask(self, additive: torch.dtype | None) -> Mask:
        """For the next token of each row: [B, 1, 1, L], by kind of layer where there are several.

        additive: a dtype for masks that are added to scores; None for bool ones.
        """
        layers = {layer.kind: layer for layer in self.layers}
        masks = {
            kind: _shaped(layer.visible(self.positions_B), additive)
            for kind, layer in layers.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def check_batched(config: Any) -> None:
    """Raises ConfigError where a model's cache has layers that cannot hold several sequences."""
    names = {type(layer) for layer in StaticCache(config=config, max_cache_len=1).layers}
    if missing := sorted(name.__name__ for name in names - set(ROWS)):
        raise ConfigError(
            f"{config.model_type}: several prompts at once need a {missing[0]} of several "
            "lengths, and there is none; give one prompt, or workload.batch=1"
        )


def _shaped(visible_BL: Tensor | None, additive: torch.dtype | None) -> Tensor | None:
    if visible_BL is None:
        return None
    mask = visible_BL[:, None, None]
    if additive is None:
        return mask
    hidden = torch.finfo(additive).min
    return torch.zeros_like(mask, dtype=additive).masked_fill_(~mask, hidden)
