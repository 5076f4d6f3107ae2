"""Which parts can work together: declared needs matched against declared capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from residency.policies.base import Conflict, Part


def conflicts(parts: Sequence[Part]) -> Iterator[Conflict]:
    """Every reason why `parts` (one per group) cannot run together, in a stable order.

    A need is met when any part of the combination, the needy one included, provides it.
    """
    provided = frozenset[str]().union(*(part.provides for part in parts))
    for part in parts:
        yield from part.faults()
        for need in part.requirements():
            if need.capability not in provided:
                yield _unmet(part, need.because, need.mend, parts)


def _unmet(part: Part, because: str, mend: str, parts: Sequence[Part]) -> Conflict:
    """Name the part and the partner whose group the mend would change."""
    partner_group = mend.partition("=")[0]
    partners = [f"{p.group}={p.name}" for p in parts if p.group == partner_group != part.group]
    return Conflict((f"{part.group}={part.name}", *partners), because, mend)
