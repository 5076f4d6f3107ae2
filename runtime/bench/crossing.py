"""Where two measured lines meet, in the coordinates of the picture: both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def crossing(lengths: Sequence[int], one: Sequence[float], other: Sequence[float]) -> float | None:
    """The least length at which both take the same time, or None where they do not meet.

    lengths: ascending, above 0. one, other: seconds at each, above 0.
    """
    points = [
        (math.log(length), math.log(a) - math.log(b))
        for length, a, b in zip(lengths, one, other, strict=True)
    ]
    for (x, gap), (next_x, next_gap) in pairwise(points):
        if gap == 0:
            return math.exp(x)
        if gap * next_gap < 0:
            return math.exp(x + (next_x - x) * gap / (gap - next_gap))
    return math.exp(points[-1][0]) if points and points[-1][1] == 0 else None
