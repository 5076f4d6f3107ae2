"""What a trace shows about its model: reuse, stack distances, unions, skew, and how they shift.

All of it is per layer and averaged over layers, unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from residency.runtime.replay.stack_distances import lru_hits, stack_distances
from residency.runtime.routing import adjacent_reuse
from residency.runtime.traces.trace import UNKNOWN, Array, Trace

VERSION = 1
CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS_SAMPLED = 64  # of each length, evenly spaced
SHARES = (0.125, 0.25, 0.5, 0.75)
TOP_SHARE = 0.25


@dataclass(frozen=True)
class Skew:
    """How unevenly experts are used. top_share: part of all accesses that goes to the most used
    quarter of a layer's experts. effective: exp of the entropy, in experts. unused: experts of all
    layers that no token was routed to.
    """

    top_share: float
    effective: float
    unused: int


@dataclass(frozen=True)
class Shift:
    """How far one part's favourites (the most used quarter of a layer) are another's.

    within: overlap of the two halves of one part. across: overlap of different parts. parts: how
    many there were.
    """

    parts: int
    within: float
    across: float


@dataclass(frozen=True)
class Info:
    """reuse: share of a token's experts that the token before it used; by_chance: the same were
    all experts as likely. distances: quantiles of LRU stack distances over one global stream, in
    experts; lru: hit rate of a global LRU by slots, from the same distances. unions: share of a
    layer's experts that a chunk of so many tokens routes to. requests, domains: None where there
    are less than two, or they are not known.
    """

    tokens: int
    decoded: int
    steps: int
    requests: int
    reuse: float
    by_chance: float
    distances: dict[str, int]
    cold: int
    lru: dict[int, float]
    unions: dict[int, float]
    skew: Skew
    request_shift: Shift | None
    domain_shift: Shift | None

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "kind": "trace-info"} | asdict(self)


def info_of(trace: Trace) -> Info:
    """Reads the whole trace."""
    space = trace.space
    layers_L = np.arange(space.num_layers, dtype=np.int32) * space.num_experts
    ids = (trace.ids_NLK.astype(np.int32) + layers_L[:, None]).ravel()
    histogram, cold = stack_distances(ids, space.num_ids)
    sums = np.cumsum(histogram)
    quantiles = {
        f"p{share}": int(np.searchsorted(sums, sums[-1] * share / 100)) for share in (10, 50, 90)
    }
    sizes = [round(space.num_ids * share) for share in SHARES]
    counts_LE = np.bincount(ids, minlength=space.num_ids).reshape(space.num_layers, -1)
    table = torch.from_numpy(trace.ids_NLK.astype(np.int16))
    return Info(
        tokens=trace.num_tokens,
        decoded=int(trace.decoded_N.sum()),
        steps=trace.num_steps,
        requests=len(np.unique(trace.requests_N)),
        reuse=adjacent_reuse(table) if trace.num_tokens > 1 else 0.0,
        by_chance=space.top_k / space.num_experts,
        distances=quantiles if sums[-1] else {},
        cold=cold,
        lru={size: int(lru_hits(histogram, size)) / len(ids) for size in sizes},
        unions={n: _union(trace, n) for n in CHUNKS if n <= trace.num_tokens},
        skew=_skew(counts_LE),
        request_shift=_shift(trace, trace.requests_N),
        domain_shift=_shift(trace, _domains(trace)),
    )


def _union(trace: Trace, length: int) -> float:
    """Share of a layer's experts that `length` tokens in a row route to."""
    last = trace.num_tokens - length
    starts = np.unique(np.linspace(0, last, min(CHUNKS_SAMPLED, last + 1)).astype(np.int64))
    space, seen = trace.space, 0
    layers = np.arange(space.num_layers)[None, :, None]
    for start in starts:
        used_LE = np.zeros((space.num_layers, space.num_experts), dtype=bool)
        used_LE[layers, trace.ids_NLK[start : start + length]] = True
        seen += int(used_LE.sum())
    return seen / (len(starts) * space.num_ids)


def _skew(counts_LE: Array) -> Skew:
    share_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy_L = -np.nansum(share_LE * np.log(share_LE), axis=1)
    top = _top(counts_LE)
    return Skew(
        top_share=float(share_LE[top].sum() / len(share_LE)),
        effective=float(np.exp(entropy_L).mean()),
        unused=int((counts_LE == 0).sum()),
    )


def _top(counts_LE: Array) -> Array:
    """bool [L, E] the most used quarter of each layer, ties to the lowest id."""
    number = max(1, round(counts_LE.shape[1] * TOP_SHARE))
    order = np.argsort(-counts_LE, axis=1, kind="stable")[:, :number]
    top = np.zeros(counts_LE.shape, dtype=bool)
    np.put_along_axis(top, order, True, axis=1)
    return top


def _domains(trace: Trace) -> Array:
    """int [N] domain of each token, UNKNOWN where it is not told."""
    names = trace.request_names
    if names is None or trace.requests_N.max() >= len(names):
        return np.full(trace.num_tokens, UNKNOWN)
    ordered = sorted(set(names))
    of_request = np.array([*map(ordered.index, names), UNKNOWN])  # the last is UNKNOWN's
    return of_request[trace.requests_N]


def _shift(trace: Trace, parts_N: Array) -> Shift | None:
    """Parts are compared by halves, so that all samples are alike in size."""
    halves: list[tuple[Array, Array]] = []
    for part in np.unique(parts_N[parts_N != UNKNOWN]):
        rows = np.flatnonzero(parts_N == part)
        if len(rows) >= 2:
            split = np.split(rows, [len(rows) // 2])
            halves.append((_favourites(trace, split[0]), _favourites(trace, split[1])))
    if len(halves) < 2:
        return None
    first, second = (np.array(side).reshape(len(halves), -1).astype(np.float64)
                     for side in zip(*halves, strict=True))  # fmt: skip
    overlap = first @ second.T / first[0].sum()
    within = float(np.trace(overlap)) / len(halves)
    across = (float(overlap.sum()) - within * len(halves)) / (len(halves) * (len(halves) - 1))
    return Shift(parts=len(halves), within=within, across=across)


def _favourites(trace: Trace, rows: Array) -> Array:
    space = trace.space
    ids = trace.ids_NLK[rows].astype(np.int32)
    ids += (np.arange(space.num_layers, dtype=np.int32) * space.num_experts)[:, None]
    return _top(np.bincount(ids.ravel(), minlength=space.num_ids).reshape(space.num_layers, -1))
