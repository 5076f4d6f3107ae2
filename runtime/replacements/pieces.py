"""What a short chunk does between two calls of experts, as two captured graphs a layer.

Short chunks are bound by launching. Their experts cannot be captured, for the host plans copies
layer by layer; between them only the number of keys that attention reads changes. So a layer has
a piece before attention and one behind it. Both work on buffers padded to one of a few numbers of
rows (buckets) and are captured for each bucket. A length always takes this path, so its bits do not
depend on what is captured.

Padding rows hold what earlier chunks left there, zeros at first. Rows are computed apart from one
another, padding rows are not written to the cache, and what leaves a layer are views without them.
These views are overwritten by the next layer's pieces: readers must be ahead on the same stream.

Memory: buckets are the first rows of the same buffers, which all layers share. A row takes 29.3 kB
for Qwen3-30B-A3B (hidden and attention width 2048 and 4096, 8 experts a token): 0.5 MB for 16 rows
and, twice as much from bucket to bucket, 15 MB for 512, which hold all buckets. What pieces need
inside lies in one pool that all graphs share, 14.3 kB a row, beside a workspace of cuBLAS.

Legend: R rows (tokens), H hidden, A attention width, N query heads, D head dim, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from residency.runtime.graphs import Graphs
from residency.runtime.kernels.rotary import KeyValues

BUCKETS = (16, 32, 64, 128, 256, 512)

_Place = tuple[int, int, int, torch.Size]  # keys, values, position, and the keys' shape


class Sizes(NamedTuple):
    """Of a model: elements of its hidden state, query heads, their size, experts of a token."""

    hidden: int
    heads: int
    head_dim: int
    top_k: int


class Buffers(NamedTuple):
    """Inputs of the pieces, then outputs: all contiguous, at fixed places."""

    hidden_RH: Tensor
    cos_RD: Tensor
    sin_RD: Tensor
    attended_RA: Tensor
    q_RND: Tensor
    h_RH: Tensor
    x_RH: Tensor
    weights_RK: Tensor
    ids_RK: Tensor  # int64

    @classmethod
    def zeros(cls, rows: int, sizes: Sizes, like: Tensor) -> Buffers:
        hidden, heads, dim, top_k = sizes

        def zeros(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=like.device)

        return cls(
            zeros(hidden),
            zeros(dim),
            zeros(dim),
            zeros(heads * dim),
            zeros(heads, dim),
            zeros(hidden),
            zeros(hidden),
            zeros(top_k),
            zeros(top_k, dtype=torch.int64),
        )

    def first(self, rows: int) -> Buffers:
        return Buffers(*(buffer[:rows] for buffer in self))

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self)


class Chunk(NamedTuple):
    """One chunk's part of the buffers, the same for all layers; heads are [1, N, rows, D]."""

    padded: Buffers
    real: Buffers
    q_heads: Tensor
    attended_heads: Tensor
    num_rows: Tensor  # int64 [], those of `real`
    cos: Tensor  # as given by the model: its layers get the same object, other chunks another


class Pieces:
    """The buffers and the graphs of one model's layers, which follow one another."""

    def __init__(self, sizes: Sizes) -> None:
        self.graphs = Graphs()
        self._sizes = sizes
        self._buffers: Buffers | None = None
        self._num_rows: Tensor | None = None
        self._chunk: Chunk | None = None
        self._places: dict[int, _Place] = {}

    def enter(self, hidden_RH: Tensor, cos: Tensor, sin: Tensor) -> Chunk:
        """The chunk that begins or goes on, with this layer's input in it; angles [1, R, D]."""
        chunk = self._chunk
        if chunk is None or chunk.cos is not cos or len(chunk.real.hidden_RH) != len(hidden_RH):
            chunk = self._chunk = self._begin(hidden_RH, cos, sin)
        chunk.real.hidden_RH.copy_(hidden_RH)
        return chunk

    def _begin(self, like_RH: Tensor, cos: Tensor, sin: Tensor) -> Chunk:
        if self._buffers is None or self._num_rows is None:
            # Ordinary tensors, which may be written in and out of inference mode.
            with torch.inference_mode(False):
                self._buffers = Buffers.zeros(BUCKETS[-1], self._sizes, like_RH)
                self._num_rows = torch.zeros((), dtype=torch.int64, device=like_RH.device)
        rows = len(like_RH)
        padded, real = self._buffers.first(bucket_of(rows)), self._buffers.first(rows)
        attended_RND = real.attended_RA.view_as(real.q_RND)
        self._num_rows.fill_(rows)
        real.cos_RD.copy_(cos[0])
        real.sin_RD.copy_(sin[0])
        heads = _heads(real.q_RND), _heads(attended_RND)
        return Chunk(padded, real, *heads, self._num_rows, cos)

    def follow(self, layer: int, kept: KeyValues, position: Tensor) -> None:
        """Forget all graphs if the layer's cache is another than the one they write to."""
        keys, values = kept
        place = (keys.data_ptr(), values.data_ptr(), position.data_ptr(), keys.shape)
        if self._places.get(layer, place) != place:
            self.graphs.clear()
            self._places.clear()
        self._places[layer] = place

    def run(self, layer: int, piece: int, chunk: Chunk, body: Callable[[], None]) -> None:
        """Do what `body` does: by running it, or by the graph that was captured of it."""
        key = (layer, piece, len(chunk.padded.hidden_RH))
        self.graphs.run(key, body, on=chunk.padded.hidden_RH.device)


def covers(hidden_BSH: Tensor) -> bool:
    """Whether a chunk runs in pieces; by its length, whatever was captured."""
    batch, steps, _ = hidden_BSH.shape
    return batch == 1 and 1 < steps <= BUCKETS[-1] and suits(hidden_BSH)


def suits(hidden_BSH: Tensor) -> bool:
    """Tensor cores' dtypes on CUDA; buffers that are written again and again have no gradient."""
    short = hidden_BSH.element_size() == 2
    return hidden_BSH.is_cuda and short and not torch.is_grad_enabled()


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def _heads(x_RND: Tensor) -> Tensor:
    return x_RND.transpose(0, 1)[None]
