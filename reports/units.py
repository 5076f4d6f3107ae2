"""Numbers as a reader sees them."""

from __future__ import annotations

from collections.abc import Sequence


def ms(seconds: float) -> str:
    """Milliseconds, three digits or more."""
    number = seconds * 1e3
    return (
        f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )


def size(num_bytes: float) -> str:
    """In GB or MB."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.1f} MB"


def share(number: float) -> str:
    """Per cent, two digits or more."""
    return f"{number:.1%}" if number < 0.1 else f"{number:.0%}"


def shares(numbers: Sequence[float]) -> str:
    """One, or from the least to the greatest."""
    least, most = share(min(numbers)), share(max(numbers))
    return least if least == most else f"{least} to {most}"


def listed(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
