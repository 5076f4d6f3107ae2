"""Verdicts: whether one time is below another, or the two cannot be told apart.

The rule is on every page, in the words of RULE.
"""

from __future__ import annotations

from enum import StrEnum

from residency.reports.measures import Measure
from residency.reports.units import share

LEAST_GAP = 0.02  # of the smaller median
FEWEST_RUNS = 2
RULE = (
    "Faster or slower is said only if the ranges of the timed runs (least to most) do not overlap "
    f"and the medians differ by more than {LEAST_GAP:.0%}. Everything else is within noise. Where "
    "either side has a single run there is no verdict, since nothing is known of the noise."
)
CHANCE = (
    "Chance alone parts the ranges of two equal configurations in 1 of 3 comparisons with two runs "
    "each, in 1 of 10 with three, in 1 of 126 with five. Jobs of a sweep run one after another: "
    "what slows a machine down for minutes shifts whole jobs, and no range shows it."
)


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    WITHIN_NOISE = "within noise"
    NONE = "no verdict (single run)"


def verdict(one: Measure, other: Measure) -> Verdict:
    """What `one` is beside `other`."""
    if min(one.num_runs, other.num_runs) < FEWEST_RUNS:
        return Verdict.NONE
    low, high = sorted((one.median, other.median))
    apart = one.most < other.least or other.most < one.least
    if not apart or high <= low * (1 + LEAST_GAP):
        return Verdict.WITHIN_NOISE
    return Verdict.FASTER if one.median < other.median else Verdict.SLOWER


def change_text(one: Measure, other: Measure) -> str:
    """How much less or more time `one` takes than `other`, by the medians."""
    ratio = one.median / other.median
    if abs(ratio - 1) < 0.0005:
        return "as much time as"
    if ratio > 2:
        return f"{ratio:,.1f} times the time of"
    return f"{share(abs(ratio - 1))} {'less' if ratio < 1 else 'more'} time than"
