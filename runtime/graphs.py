"""Graphs of bodies that do the same work each time: run, then captured, then replayed.

A body's first run is eager, which compiles its kernels; its second is captured; later ones replay.
What runs is the same work in each case, so results do not depend on what was captured. A body
reads and writes tensors that stay where they are.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from residency.runtime.faults import ran_out


class Graphs:
    """The graphs of bodies that follow one another on one stream, by key.

    captures: graphs are captured where the device can; without, all runs eagerly, in the same bits.
    """

    def __init__(self) -> None:
        self.captures = True
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: run, not captured
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # torch's handle

    def __len__(self) -> int:
        """How many graphs are captured."""
        return sum(graph is not None for graph in self._graphs.values())

    def clear(self) -> None:
        """Forget all graphs: the tensors they hold for are gone."""
        self._graphs.clear()
        self._pool = None  # a pool whose graphs are gone takes no new ones

    def run(self, key: Hashable, body: Callable[[], None], *, on: torch.device) -> None:
        """Do what `body` does on the device `on`: by running it, or by the graph captured of it.

        Inside a caller's own capture the body runs, so that the caller's graph gets its kernels.
        """
        replays = (
            self.captures and on.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        )
        graph = self._graphs.get(key) if replays else None
        if graph is None and replays and key in self._graphs:
            graph = self._graphs[key] = self._capture(body)
        if graph is not None:
            graph.replay()
            return
        body()
        self._graphs.setdefault(key, None)

    def _capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """None where it cannot be captured; no more is tried then.

        `torch.cuda.graph` would wait for all streams and empty the allocator's cache at each of
        many captures, while copies are in flight. Bodies leave their results in tensors from
        outside, so graphs may use the pool's memory over one another.
        """
        self._stream = self._stream or torch.cuda.Stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collection(), torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    body()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if ran_out(error) or ran_out(error.__context__):
                raise  # no run without graphs that nobody asked for
            self.captures = False
            warnings.warn(f"short chunks run without graphs: {error}", RuntimeWarning, stacklevel=2)
            return None
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector could free another graph in the middle of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
