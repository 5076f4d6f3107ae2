"""Verdicts: whether one time is below another, or the two cannot be told apart.

The rule is on every page, in the words of RULE.
"""

from __future__ import annotations

from enum import StrEnum

from residency.reports.measures import Measure

LEAST_GAP = 0.02  # of the smaller median
FEWEST_RUNS = 2
RULE = (
    "Faster or slower is said only if the ranges of the timed runs (least to most) do not overlap "
    f"and the medians differ by more than {LEAST_GAP:.0%}. Everything else is within noise. Where "
    "either side has a single run there is no verdict, since nothing is known of the noise. Jobs "
    "of a sweep run one after another: what slows a machine down for minutes shifts whole jobs, "
    "and no range shows it."
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
    share = one.median / other.median - 1
    if abs(share) < 0.0005:
        return "as much time as"
    number = f"{abs(share):.1%}" if abs(share) < 0.1 else f"{abs(share):.0%}"
    if share > 1:
        return f"{share + 1:.1f} times the time of"
    return f"{number} {'less' if share < 0 else 'more'} time than"
