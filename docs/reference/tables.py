"""Tables and plain text in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

MARKUP = re.compile(r"[*<\[\]]|(?<!\w)_|_(?!\w)")
MADE = "<!-- Generated: `make references` writes this page anew. -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a column that is empty in every row is left out."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in kept], ["---"] * len(kept)]
    lines += [[row[i].replace("|", "\\|") for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Text whose stars, brackets, less-than signs and outer underscores are no Markdown."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else MARKUP.sub(r"\\\g<0>", p) for p in pieces)
