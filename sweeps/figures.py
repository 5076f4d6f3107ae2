"""The few numbers of a job that a table shows, read from its result.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figures:
    """ttft_s: by prompt length in tokens, ascending; medians where there were several runs.

    decode_s: of a decode step. hit_rate: of decode. Empty, or None, where a result has none.
    """

    ttft_s: tuple[tuple[int, float], ...] = ()
    decode_s: float | None = None
    hit_rate: float | None = None

    @classmethod
    def of(cls, result: dict[str, Any]) -> Figures:
        if result.get("kind") == "bench":
            decode = result["decode"]
            return cls(tuple(_benched(result)), decode["tpot_s"]["median"], decode["hit_rate"])
        if "phases" in result:
            return cls(tuple(_run(result)), result["tpot_s"], result["phases"][-1]["hit_rate"])
        return cls()


def _benched(result: dict[str, Any]) -> Iterator[tuple[int, float]]:
    for point in result["prefill"]:
        yield point["tokens"], point["ttft_s"]["median"]


def _run(result: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Of the first prompt: those behind it wait for it."""
    first = result["sequences"][0] if "sequences" in result else result
    yield first["prompt_tokens"], first["ttft_s"]
