"""Rates: what the two sides of a decode step took lately, layer by layer, fitted to lines.

Four lines a layer: fetching and computing, each alone and beside the other, since both read host
memory and slow each other down. A line is fitted to the last WINDOW steps of its kind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from residency.policies.decode import Line, Measured, Way

WINDOW = 8  # steps; one that was held up by something else is outvoted
SHRINKAGE = 0.01  # pull of a line's slope towards seconds per expert, in relative variance
FADING = 1 / 8  # of the mean number of misses, per step

FloatArray = np.ndarray
IntArray = np.ndarray


class StepTimes(NamedTuple):
    """One decode step: experts and seconds of each side, arrays [L]."""

    fetched: IntArray
    fetch_s: FloatArray
    computed: IntArray
    host_s: FloatArray


class Rates:
    """Running measurements of every layer; alone first, then beside, the link before the host."""

    def __init__(self, num_layers: int) -> None:
        self._num_4LW = np.zeros((4, num_layers, WINDOW))
        self._seconds_4LW = np.zeros((4, num_layers, WINDOW))
        self._seen_4L = np.zeros((4, num_layers), dtype=np.int64)
        self._steps_LW = np.zeros((num_layers, len(Way)), dtype=np.int64)
        self._idle_s_LW = np.zeros((num_layers, len(Way)))
        self._misses_L = np.zeros(num_layers)

    def observe(self, step: StepTimes) -> None:
        """Take in one step."""
        fetching, computing = step.fetched > 0, step.computed > 0
        both = fetching & computing
        ways_WL = np.stack([fetching & ~computing, computing & ~fetching, both])
        self._insert(
            np.concatenate([ways_WL, both[None]]),
            np.stack([step.fetched, step.computed] * 2),
            np.stack([step.fetch_s, step.host_s] * 2),
        )
        layer_s = np.maximum(step.fetch_s * fetching, step.host_s * computing)
        self._idle_s_LW += layer_s[:, None]
        self._idle_s_LW[ways_WL.T] = 0
        self._steps_LW += ways_WL.T
        self._misses_L += FADING * (step.fetched + step.computed - self._misses_L)

    def _insert(self, taken_4L: FloatArray, num_4L: IntArray, seconds_4L: FloatArray) -> None:
        line, layer = np.nonzero(taken_4L)
        place = self._seen_4L[line, layer] % WINDOW
        first = self._seen_4L[line, layer] == 0
        for window_4LW, value_4L in ((self._num_4LW, num_4L), (self._seconds_4LW, seconds_4L)):
            value = value_4L[line, layer]
            # The first step of a kind stands for the whole window until others come.
            window_4LW[line[first], layer[first]] = value[first, None]
            window_4LW[line, layer, place] = value
        self._seen_4L[line, layer] += 1

    def measured(self) -> Measured:
        """What a decode target is told."""
        fixed_4L, each_4L = fit(self._num_4LW, self._seconds_4LW)
        unknown = self._seen_4L == 0
        fixed_4L[unknown] = each_4L[unknown] = np.nan
        lines = [
            Line(torch.from_numpy(fixed_L), torch.from_numpy(each_L))
            for fixed_L, each_L in zip(fixed_4L, each_4L, strict=True)
        ]
        rest = (self._misses_L, self._steps_LW, self._idle_s_LW)
        return Measured(*lines, *(torch.from_numpy(array.copy()) for array in rest))


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
