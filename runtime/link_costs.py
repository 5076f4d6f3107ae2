"""Link costs: what copies take and how long the link idles between layers, measured while running.

From the timed marks of each chunk, read when the device has passed them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from residency.policies.prefill import Costs
from residency.runtime.lanes import Mark

LINK_IDLE_S = 5e-6  # between two copies, if the second was not there when the first ended
RECENT = 5  # chunks that count


@dataclass
class LayerTimes:
    """Marks of one layer of one chunk.

    ahead: behind the last copy issued before its router had spoken. first: the first one behind
    that; last: the last of all. heard_s, issued_s: when the host had its router's answer, if it
    waited for it, and when all of the layer was issued, by the host's clock.
    """

    routes: Mark | None = None
    ahead: Mark | None = None
    first: Mark | None = None
    last: Mark | None = None
    heard_s: float | None = None
    issued_s: float = 0.0

    @property
    def host_s(self) -> float:
        """What the host took behind the answer; 0 where it did not wait for one."""
        return 0.0 if self.heard_s is None else self.issued_s - self.heard_s


@dataclass
class ChunkTimes:
    """Marks of one chunk. copies: experts of each copy over the link, and the mark behind it."""

    num_tokens: int
    layers: list[LayerTimes]
    copies: list[tuple[int, Mark]] = field(default_factory=list)

    def passed(self) -> bool:
        marks = [times.routes for times in self.layers] + [mark for _, mark in self.copies[-1:]]
        return all(mark is not None and mark.passed() for mark in marks)

    def expert_s(self) -> float | None:
        num_experts = sum(num for num, _ in self.copies)
        seconds = sum(mark.seconds() for _, mark in self.copies)
        return seconds / num_experts if num_experts and seconds > 0 else None

    def gap_s(self) -> float | None:
        """Median time to the next layer's routes from when a layer was issued and copied, or from
        its own routes if that was before.
        """
        gaps = []
        for times, following in itertools.pairwise(self.layers):
            assert times.routes is not None and following.routes is not None, "the chunk has passed"
            gap = times.routes.until(following.routes) - times.host_s
            if times.last is not None:
                gap = min(gap, times.last.until(following.routes))
            gaps.append(max(gap, 0.0))
        return median(gaps) if gaps else None

    def host_s(self) -> float | None:
        """Median time that the host takes for a layer that waits, behind the answer."""
        found = [times.host_s for times in self.layers if times.heard_s is not None]
        return median(found) if found else None

    def answer_s(self) -> float | None:
        """Median time from a layer's routes to the first copy that waited for them, where the link
        was idle before it: what the host takes to hear and to issue.
        """
        found = []
        for times in self.layers:
            if times.first is None or times.first.begin is None or times.routes is None:
                continue
            if times.ahead is None or times.ahead.until(times.first.begin) > LINK_IDLE_S:
                found.append(times.routes.until(times.first.begin))
        return median(found) if found else None


class LinkCosts:
    """Of recent chunks; gaps and the host's times by length of chunk, a power of two.

    An expert's time is their median. Of other times the least counts, and none before the second
    chunk: what holds a chunk up, as a kernel's first run does, makes them longer, and what is
    copied beyond them delays what is needed.
    """

    def __init__(
        self,
        known: dict[str, Any] | None = None,
        *,
        beside: bool = True,
        assumed: Costs | None = None,
    ) -> None:
        """known: what `as_dict` gave before. beside: whether copies run beside the compute; where
        they do not, no idle time of the link can be used. assumed: told until chunks have told
        more; never kept.
        """
        self._beside = beside
        self._assumed = assumed
        self._expert_s, self._answer_s = _Recent(), _Recent()
        self._gap_s, self._host_s = _ByLength(grows=True), _ByLength(grows=False)
        self._waiting: deque[ChunkTimes] = deque()
        if known is not None:
            self._expert_s.add(known["expert_s"])
            for _ in range(2):
                self._answer_s.add(known["answer_s"])
                self._gap_s.take(known["gap_s"])
                self._host_s.take(known["host_s"])

    def as_dict(self) -> dict[str, Any]:
        """Seconds; null for what was never measured."""
        return {
            "expert_s": self._expert_s.median,
            "answer_s": self._answer_s.least or 0.0,
            "gap_s": self._gap_s.as_dict(),
            "host_s": self._host_s.as_dict(),
        }

    def observe(self, chunk: ChunkTimes) -> None:
        """Take in a chunk, as soon as the device is done with it."""
        self._waiting.append(chunk)

    def of(self, num_tokens: int) -> Costs | None:
        """What is assumed, or None, until chunks have told them."""
        while self._waiting and self._waiting[0].passed():
            self._learn(self._waiting.popleft())
        expert_s, answer_s = self._expert_s.median, self._answer_s.least or 0.0
        gap_s = self._gap_s.at(num_tokens)
        if expert_s is None or gap_s is None:
            if self._assumed is None or self._beside:
                return self._assumed
            return replace(self._assumed, idle_s=0.0)
        if not self._beside:
            return Costs(expert_s, 0.0)
        host_s = max(0.0, (self._host_s.at(num_tokens) or 0.0) - answer_s)
        return Costs(expert_s, gap_s + answer_s, host_s)

    def _learn(self, chunk: ChunkTimes) -> None:
        self._expert_s.add(chunk.expert_s())
        self._answer_s.add(chunk.answer_s())
        self._gap_s.add(chunk.num_tokens, chunk.gap_s())
        self._host_s.add(chunk.num_tokens, chunk.host_s())


class _Recent:
    """The last few values of one quantity."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float | None) -> None:
        if value is not None:
            self._values.append(value)

    @property
    def median(self) -> float | None:
        return median(self._values) if self._values else None

    @property
    def least(self) -> float | None:
        """None before the second value."""
        return min(self._values) if len(self._values) > 1 else None


class _ByLength:
    """Values of one quantity by length of chunk."""

    def __init__(self, *, grows: bool) -> None:
        """grows: beyond the longest chunk measured in proportion to the length; else as there."""
        self._grows = grows
        self._recent: dict[int, _Recent] = defaultdict(_Recent)

    def add(self, num_tokens: int, value: float | None) -> None:
        if value is not None:
            self._recent[1 << (num_tokens - 1).bit_length()].add(value)

    def take(self, known: dict[str, float]) -> None:
        """A value for each length, as `as_dict` gave them."""
        for size, value in known.items():
            self._recent[int(size)].add(value)

    def as_dict(self) -> dict[str, float]:
        return {str(size): value for size, value in self._known.items()}

    @property
    def _known(self) -> dict[int, float]:
        values = {size: self._recent[size].least for size in sorted(self._recent)}
        return {size: value for size, value in values.items() if value is not None}

    def at(self, num_tokens: int) -> float | None:
        """Between the lengths measured, by a line; None where there is none."""
        known = self._known
        if not known:
            return None
        sizes = list(known)
        at = bisect_left(sizes, num_tokens)
        if at == 0:
            return known[sizes[0]]
        below = sizes[at - 1]
        if at == len(sizes):
            return known[below] * num_tokens / below if self._grows else known[below]
        part = (num_tokens - below) / (sizes[at] - below)
        return known[below] + part * (known[sizes[at]] - known[below])
