"""The residents of a pool as a binary heap by (key, id), the next victim on top.

heap: int32 [slots], ids. place: int32 [num_ids], where each id is in the heap, ABSENT, or PENDING
for a resident that is not in it yet. known: int64 [num_ids], the key by which each lies in the
heap: never above its key. A key that rises, as it does with most references, is looked at again
only when its id comes to the top, so a hit costs next to nothing.
"""

from __future__ import annotations

from residency.runtime.replay.jit import jit
from residency.runtime.traces.trace import Array

ABSENT, PENDING = -1, -2


@jit
def rise(heap: Array, place: Array, known: Array, at: int) -> None:
    """Move what is at `at` up while it is lower than what lies above."""
    own = heap[at]
    key = known[own]
    while at > 0:
        above = (at - 1) >> 1
        other = heap[above]
        if known[other] < key or (known[other] == key and other < own):
            break
        heap[at] = other
        place[other] = at
        at = above
    heap[at] = own
    place[own] = at


@jit
def sink(heap: Array, place: Array, known: Array, at: int, size: int) -> None:
    """Move what is at `at` down while one of the two below it is lower."""
    own = heap[at]
    key = known[own]
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        other = heap[below]
        if below + 1 < size:
            right = heap[below + 1]
            if known[right] < known[other] or (known[right] == known[other] and right < other):
                below += 1
                other = right
        if key < known[other] or (key == known[other] and own < other):
            break
        heap[at] = other
        place[other] = at
        at = below
    heap[at] = own
    place[own] = at


@jit
def push(heap: Array, place: Array, known: Array, size: int, own: int) -> None:
    """Add an id to a heap of `size`."""
    heap[size] = own
    rise(heap, place, known, size)


@jit
def pop(heap: Array, place: Array, known: Array, size: int) -> int:
    """Take the top out of a heap of `size`, which is one less afterwards."""
    top: int = heap[0]
    place[top] = ABSENT
    if size > 1:
        heap[0] = heap[size - 1]
        sink(heap, place, known, 0, size - 1)
    return top


@jit
def lowest(heap: Array, place: Array, known: Array, keys: Array, size: int) -> int:
    """The id with the lowest (key, id), now on top of a heap of `size` > 0."""
    top: int = heap[0]
    while known[top] < keys[top]:
        known[top] = keys[top]
        sink(heap, place, known, 0, size)
        top = heap[0]
    return top


@jit
def reorder(heap: Array, place: Array, known: Array, keys: Array, size: int) -> None:
    """Make a heap of what lies in it, after all keys may have changed."""
    for at in range(size):
        known[heap[at]] = keys[heap[at]]
    for at in range(size // 2 - 1, -1, -1):
        sink(heap, place, known, at, size)
