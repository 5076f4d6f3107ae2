"""Stack distances: how many other ids were used since an id's last use.

R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2),
1970: LRU with C places hits exactly where the distance is below C, so one pass gives every size.
Accesses are taken one by one; a pool that sees the experts of a step at once, and protects them,
differs by a few of a thousand.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from residency.runtime.replay.jit import jit
from residency.runtime.traces.trace import Array


def stack_distances(ids: Array, num_ids: int) -> tuple[Array, int]:
    """(int64 [num_ids] accesses by distance, accesses whose id was never used before).

    ids: integers below num_ids, in the order of use.
    """
    histogram = np.zeros(num_ids, dtype=np.int64)
    room = 4 * num_ids + 1
    tree, owner = np.zeros((2, room + 1), dtype=np.int64)
    last = np.zeros(num_ids, dtype=np.int64)  # 0 for never
    cold: int = _count(np.ascontiguousarray(ids, dtype=np.int64), histogram, tree, owner, last)
    return histogram, cold


def lru_hits(histogram: Array, num_slots: Any) -> Any:
    """Hits of LRU with so many places: int, or an array for an array of sizes."""
    sums = np.concatenate([[0], np.cumsum(histogram)])
    return sums[np.minimum(num_slots, len(histogram))]


@jit
def _count(ids: Array, histogram: Array, tree: Array, owner: Array, last: Array) -> int:
    """A Fenwick tree over times, with one at the last use of each id. When times run out they are
    numbered anew, so the tree stays as small as the ids are few.
    """
    room = len(tree) - 1
    now = seen = 0
    for own in ids:
        if now == room:
            now = 0
            for at in range(1, room + 1):
                tree[at] = 0
                other = owner[at]
                if last[other] == at:
                    now += 1
                    owner[now] = other
                    last[other] = now
            for at in range(1, now + 1):
                _add(tree, at, 1)
        now += 1
        before = last[own]
        if before == 0:
            seen += 1
        else:
            histogram[seen - _sum(tree, before)] += 1
            _add(tree, before, -1)
        last[own] = now
        owner[now] = own
        _add(tree, now, 1)
    return seen


@jit
def _add(tree: Array, at: int, change: int) -> None:
    while at < len(tree):
        tree[at] += change
        at += at & -at


@jit
def _sum(tree: Array, at: int) -> int:
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total
