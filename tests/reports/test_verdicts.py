"""The noise rule, as docs/reports.md states it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_results import bench, write

from residency.reports.against import compare
from residency.reports.contests import contests_of
from residency.reports.measures import DECODE, At, Measure
from residency.reports.reading import read_folders
from residency.reports.verdicts import LEAST_GAP, Verdict, verdict

TIMES = st.floats(1e-6, 1e3)
OPPOSITE = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}


def measure(*values):
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return Measure(At(DECODE), (), middle, ordered[0], ordered[-1], len(ordered))


MEASURES = st.lists(TIMES, min_size=1, max_size=5).map(lambda values: measure(*values))


@given(MEASURES, MEASURES)
def test_the_other_way_round_it_is_the_opposite(one, other):
    said = verdict(one, other)
    assert verdict(other, one) is OPPOSITE.get(said, said)


@given(MEASURES)
def test_the_same_is_never_faster_than_itself(one):
    assert verdict(one, one) in (Verdict.WITHIN_NOISE, Verdict.NONE)


@given(MEASURES, MEASURES)
def test_a_verdict_needs_ranges_apart_and_a_gap(one, other):
    if verdict(one, other) is Verdict.FASTER:
        assert one.most < other.least
        assert other.median > one.median * (1 + LEAST_GAP)
        assert min(one.num_runs, other.num_runs) > 1


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ((10, 11), (12, 13), Verdict.FASTER),
        ((12, 13), (10, 11), Verdict.SLOWER),
        ((10, 12), (12, 14), Verdict.WITHIN_NOISE),  # ranges touch
        ((100, 100.1), (101, 101.2), Verdict.WITHIN_NOISE),  # apart, but by 1 %
        ((10,), (20, 21), Verdict.NONE),
        ((10, 11), (20,), Verdict.NONE),
    ],
)
def test_the_rule(one, other, said):
    assert verdict(measure(*one), measure(*other)) is said


def contests(folder):
    return contests_of(read_folders([folder]))


def test_a_set_beside_itself_is_within_noise(sweep):
    comparison = compare(contests(sweep), contests(sweep))
    assert len(comparison.rows) == 4 * 3
    assert {row.verdict for row in comparison.rows} == {Verdict.WITHIN_NOISE}
    assert comparison.alone == comparison.differences == ()


def test_rows_find_their_partners_whatever_their_folders(tmp_path):
    fast, slow = bench({4: [1, 1.1], 8: [2, 2.1]}, [1, 1.1]), bench({4: [2, 2.1]}, [1, 1.1])
    write(tmp_path / "new" / "a", fast)
    write(tmp_path / "new" / "b", bench({4: [1, 1]}, [1, 1], cache="lfu"))
    other = slow | {"environment": slow["environment"] | {"torch": "3", "cpus": "64"}}
    other["config"] = other["config"] | {"cache": other["config"]["cache"] | {"scope": "global"}}
    write(tmp_path / "old" / "z", other)
    write(tmp_path / "old" / "y", bench({4: [1, 1]}, [1, 1], slots=8))
    found = compare(contests(tmp_path / "new"), contests(tmp_path / "old"))
    assert [(row.at.text, str(row.verdict)) for row in found.rows] == [
        ("TTFT at 4 tokens", "faster"),
        ("decode", "within noise"),
    ]
    told = "\n".join((*found.alone, *found.differences))
    for word in ("TTFT at 8 tokens is in one set", "no partner in the base", "in the base alone"):
        assert word in told
    for word in ("the machine differs: cpus 2", "torch not told, in the base 3", "cache.scope"):
        assert word in told
