"""Constants: the numbers that a forecast follows from, each with where it is from."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class HostLine:
    """Seconds for n experts of a layer on the host: fixed_s + n * each_s."""

    fixed_s: float
    each_s: float


@dataclass(frozen=True)
class Constants:
    """Of one model on one machine.

    link_bytes_s: large copies. gather_bytes_s: scattered experts, as decode's misses come.
    device_copy_bytes_s: slot to staging; None where no mode's copies can be told.
    chunk_s: (tokens, seconds) of a chunk with every expert resident, ascending.
    step_s: of a decode step that hits always. None: not known.
    host: experts computed on the host, None where that is not known. host_beside, and
    gather_beside_bytes_s: while the other side runs.
    beside: whether copies run beside the compute; on the CPU they do not.
    exact: measured with this very model; otherwise its arithmetic is estimated.
    sources: lines that say what each is from.
    """

    link_bytes_s: float
    gather_bytes_s: float
    chunk_s: tuple[tuple[int, float], ...]
    step_s: float | None
    device_copy_bytes_s: float | None = None
    host: HostLine | None = None
    host_beside: HostLine | None = None
    gather_beside_bytes_s: float | None = None
    beside: bool = True
    exact: bool = False
    sources: tuple[str, ...] = ()

    def compute_s(self, num_tokens: int) -> float:
        """Between the lengths known, by a line; beyond the longest in proportion."""
        lengths = [length for length, _ in self.chunk_s]
        seconds = [value for _, value in self.chunk_s]
        at = bisect_left(lengths, num_tokens)
        if at == 0:
            return seconds[0]
        if at == len(lengths):
            return seconds[-1] * num_tokens / lengths[-1]
        part = (num_tokens - lengths[at - 1]) / (lengths[at] - lengths[at - 1])
        return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])

    def with_host(self, host: HostLine, source: str) -> Constants:
        return replace(self, host=host, sources=(*self.sources, source))
