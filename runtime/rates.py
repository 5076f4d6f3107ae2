"""Rates: what the two sides of a decode step took lately, layer by layer, fitted to lines.

Four lines a layer: fetching and computing, each alone and beside the other, since both read host
memory and slow each other down. A line is fitted to the last WINDOW steps of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from residency.policies.decode import Line, Measured, Way

WINDOW = 8  # steps; one that was held up by something else is outvoted
SHRINKAGE = 0.01  # pull of a line's slope towards seconds per expert, in relative variance
FADING = 1 / 8  # of the mean number of misses, per step

FloatArray = np.ndarray
IntArray = np.ndarray
BoolArray = np.ndarray


class StepTimes(NamedTuple):
    """One decode step: experts and seconds of each side, arrays [L]."""

    fetched: IntArray
    fetch_s: FloatArray
    computed: IntArray
    host_s: FloatArray


class KnownLine(NamedTuple):
    """Seconds of n experts: fixed_s + n * each_s."""

    fixed_s: float
    each_s: float


class KnownRates(NamedTuple):
    """What is known of a machine before the first step: the sides alone, and side by side."""

    fetched: KnownLine
    computed: KnownLine
    fetched_beside: KnownLine
    computed_beside: KnownLine


class Rates:
    """Running measurements of every layer; alone first, then beside, the link before the host."""

    def __init__(
        self, num_layers: int, known: KnownRates | None = None, most: int = WINDOW
    ) -> None:
        """known: counts like WINDOW steps of each way with 1 to `most` experts, which real steps
        then displace one by one.
        """
        self._num_layers = num_layers
        self._num_4LW = np.zeros((4, num_layers, WINDOW))
        self._seconds_4LW = np.zeros((4, num_layers, WINDOW))
        self._seen_4L = np.zeros((4, num_layers), dtype=np.int64)
        self._steps_LW = np.zeros((num_layers, len(Way)), dtype=np.int64)
        self._idle_s_LW = np.zeros((num_layers, len(Way)))
        self._misses_L = np.zeros(num_layers)
        if known is not None:
            self._assume(known, most)

    def _assume(self, known: KnownRates, most: int) -> None:
        up = np.linspace(1, most, WINDOW).round().astype(np.int64)
        none = np.zeros_like(up)
        for fetched, computed, fetch, host in (
            (up, none, known.fetched, known.computed),
            (none, up, known.fetched, known.computed),
            (up, up[::-1], known.fetched_beside, known.computed_beside),
        ):
            self.observe(
                [
                    StepTimes(*(np.full(self._num_layers, value) for value in step))
                    for step in zip(
                        fetched,
                        (fetch.fixed_s + fetch.each_s * fetched) * (fetched > 0),
                        computed,
                        (host.fixed_s + host.each_s * computed) * (computed > 0),
                        strict=True,
                    )
                ]
            )
        self._idle_s_LW[:] = 0

    def observe(self, steps: Sequence[StepTimes]) -> None:
        """Take in steps, in order, at most WINDOW."""
        fetched, fetch_s, computed, host_s = map(np.stack, zip(*steps, strict=True))
        fetching, computing = fetched > 0, computed > 0
        both = fetching & computing
        ways = np.stack([fetching & ~computing, computing & ~fetching, both], axis=-1)
        self._insert(
            np.stack([ways[..., Way.FETCHED], ways[..., Way.COMPUTED], both, both]),
            np.stack([fetched, computed] * 2),
            np.stack([fetch_s, host_s] * 2),
        )
        layer_s = np.maximum(fetch_s * fetching, host_s * computing)
        not_since = ~np.logical_or.accumulate(ways[::-1])[::-1]
        self._idle_s_LW[ways.any(axis=0)] = 0
        self._idle_s_LW += (layer_s[..., None] * not_since).sum(axis=0)
        self._steps_LW += ways.sum(axis=0)
        lasting = (1 - FADING) ** len(steps)
        self._misses_L *= lasting
        self._misses_L += (1 - lasting) * (fetched + computed).mean(axis=0)

    def _insert(self, taken: BoolArray, num: IntArray, seconds: FloatArray) -> None:
        """taken: bool [4, steps, L], which steps are of a line's kind."""
        line, step, layer = np.nonzero(taken)
        order = self._seen_4L[line, layer] + (taken.cumsum(axis=1) - 1)[line, step, layer]
        first = order == 0
        for window_4LW, values in ((self._num_4LW, num), (self._seconds_4LW, seconds)):
            value = values[line, step, layer]
            # The first step of a kind stands for the whole window until others come.
            window_4LW[line[first], layer[first]] = value[first, None]
            window_4LW[line, layer, order % WINDOW] = value
        self._seen_4L += taken.sum(axis=1)

    def measured(self) -> Measured:
        """What a decode target is told."""
        fixed_4L, each_4L = fit(self._num_4LW, self._seconds_4LW)
        unknown = self._seen_4L == 0
        fixed_4L[unknown] = each_4L[unknown] = np.nan
        lines = [
            Line(torch.from_numpy(fixed_L), torch.from_numpy(each_L))
            for fixed_L, each_L in zip(fixed_4L, each_4L, strict=True)
        ]
        fetched, computed, fetched_beside, computed_beside = lines
        return Measured(
            fetched=fetched,
            computed=computed,
            fetched_beside=fetched_beside,
            computed_beside=computed_beside,
            misses=torch.from_numpy(self._misses_L.copy()),
            steps=torch.from_numpy(self._steps_LW.copy()),
            idle_s=torch.from_numpy(self._idle_s_LW.copy()),
        )


def fit(num: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(fixed, each) of seconds = fixed + num * each over the last axis, neither below 0.

    The slope is that of least squares without outliers, shrunk towards seconds per expert as far
    as the numbers hardly vary; the line is then laid through the median, so that it is right at the
    numbers which occur even where its slope is not.
    """
    rate = seconds / np.maximum(num, 1)
    typical = np.median(rate, axis=-1, keepdims=True)
    weight = ((rate <= 4 * typical) & (rate >= typical / 4)).astype(float)
    total = np.maximum(weight.sum(-1), 1)
    num_mean, s_mean = (weight * num).sum(-1) / total, (weight * seconds).sum(-1) / total
    pull = SHRINKAGE * num_mean
    covariance = (weight * num * seconds).sum(-1) / total - num_mean * s_mean
    variance = (weight * num * num).sum(-1) / total - num_mean * num_mean
    each = (covariance + pull * s_mean) / np.maximum(variance + pull * num_mean, 1e-12)
    each = np.maximum(each, 0)
    fixed = np.median(seconds - each[..., None] * num, axis=-1)
    below = fixed < 0
    return np.where(below, 0, fixed), np.where(below, typical[..., 0], each)
