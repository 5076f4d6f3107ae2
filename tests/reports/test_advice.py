"""Which configuration wins where, and which is recommended, on results made by hand."""

import pytest
from made_results import bench, write

from residency.reports.advice import advice_of
from residency.reports.contests import contests_of
from residency.reports.crossings import meetings_of
from residency.reports.effects import effects_of, telling
from residency.reports.measures import DECODE
from residency.reports.reading import read_folders
from residency.reports.report import report_on
from residency.reports.winners import places_of
from residency.reports.wording import answer, warnings

NEAR = (0.99, 1, 1.01)  # of a median, what the runs took


def times(median):
    return [median * ratio for ratio in NEAR]


@pytest.fixture
def contest_of(tmp_path):
    def make(*results):
        for number, result in enumerate(results):
            write(tmp_path / "set" / f"{number:02}", result)
        (contest,) = contests_of(read_folders([tmp_path / "set"]))
        return contest

    return make


def made(short, long, decode, **more):
    return bench({4: times(short), 64: times(long)}, times(decode), **more)


def test_the_best_everywhere_is_recommended(contest_of):
    contest = contest_of(made(1, 2, 3, cache="lru"), made(0.8, 1.5, 2, cache="lfu"))
    advice = advice_of(contest)
    assert advice.entrant.choice == {"cache": "lfu"}
    assert "decode takes 33% less time than the next" in advice.because
    assert "the fastest alone at 2 of 2" in advice.because
    assert advice.others == ()


def test_who_is_slower_nowhere_goes_before_who_is_often_fastest(contest_of):
    """lfu leads decode by far, but trails with long prompts; lru is within noise of the best."""
    best = made(1, 1, 1, cache="lru")
    steady = bench({4: [0.98, 1.005, 1.2], 64: [0.98, 1.005, 1.2]}, [0.9, 1.3, 1.4], cache="lfu")
    trails = bench({4: times(0.999), 64: times(2)}, [0.5, 0.7, 1.35], cache="fifo")
    assert advice_of(contest_of(best, steady, trails)).entrant.choice["cache"] == "lru"


def test_when_another_is_better_is_said(contest_of):
    contest = contest_of(made(1, 2, 1, mode="demand"), made(1.5, 1.6, 1, mode="always_stream"))
    advice = advice_of(contest)
    assert advice.entrant.choice == {"prefill": "demand"}
    assert advice.others == (
        "For TTFT at 64 tokens: prefill=always_stream (job 1) takes 20% less time.",
    )


def test_the_best_of_another_pool_is_said_with_its_memory(contest_of):
    advice = advice_of(contest_of(made(1, 1, 1, slots=8), made(1, 1, 2, slots=4)))
    (line,) = advice.others
    assert "With a pool of 4 slots" in line and "less" in line and "(slower)" in line


def test_single_runs_recommend_nothing_for_sure(contest_of, tmp_path):
    contest_of(bench({4: [1]}, [1], cache="lru"), bench({4: [2]}, [2], cache="lfu"))
    (section,) = report_on(read_folders([tmp_path / "set"])).sections
    assert "repeat the runs" in answer(section)


def test_no_difference_is_said_to_be_none(contest_of, tmp_path):
    contest_of(made(1, 1, 1, cache="lru"), made(1, 1, 1, cache="lfu"))
    (section,) = report_on(read_folders([tmp_path / "set"])).sections
    assert answer(section).startswith("No configuration is better than another beyond noise")


def test_points_that_not_all_have_are_no_ground_for_advice(contest_of):
    one = bench({4: times(1), 64: times(1)}, times(1), cache="lru")
    other = bench({4: times(2)}, times(2), cache="lfu")
    contest = contest_of(one, other)
    assert len(places_of(contest)) == 3
    assert "of 1 points" in advice_of(contest).because


def test_the_winner_of_each_point_leads_its_ranking(contest_of):
    contest = contest_of(made(1, 4, 3, cache="lru"), made(2, 3, 3.001, cache="lfu"))
    decode, short, long = places_of(contest)
    assert decode.at.quantity == DECODE and [e.number for e in decode.level] == ["1"]
    assert (short.best.number, long.best.number) == ("0", "1")
    assert short.behind is short.ranking[1]


def test_lines_cross_where_the_lead_changes_beyond_noise(contest_of):
    (met,) = meetings_of(contest_of(made(1, 4, 1, mode="demand"), made(2, 2, 1, mode="in_place")))
    assert (met.before.choice["prefill"], met.after.choice["prefill"]) == ("demand", "in_place")
    assert met.tokens == pytest.approx(16)  # both halve their distance, on logarithmic axes


def test_a_lead_within_noise_is_no_crossing(contest_of):
    contest = contest_of(made(1, 2.001, 1, mode="demand"), made(1.001, 2, 1, mode="in_place"))
    assert meetings_of(contest) == []


def test_effects_pair_what_differs_in_one_key_alone(contest_of):
    sizes = [made(s, s, s, cache=c, slots=n) for c, s in (("lru", 2), ("lfu", 1)) for n in (4, 8)]
    effects = effects_of(contest_of(*sizes))
    cache = [e for e in effects if e.key == "cache"]
    assert {(e.value, e.other, len(e.verdicts), round(e.ratio, 6)) for e in cache} == {
        ("lfu", "lru", 2, 0.5)
    }
    assert {round(e.ratio, 6) for e in effects if e.key == "cache.slots"} == {1}
    told = telling(effects)
    assert len(told) == 3 and all("cache=lfu instead of lru" in line for line in told)


def test_other_models_and_machines_are_other_questions(tmp_path):
    here = made(1, 1, 1)
    write(tmp_path / "0", here)
    write(tmp_path / "1", here | {"environment": here["environment"] | {"device_name": "other"}})
    model = {"model": {"_target_": "residency.runtime.models.folder.Folder"}}
    write(tmp_path / "2", here | {"config": here["config"] | model})
    write(tmp_path / "3", made(2, 2, 2, cache="lfu"))
    contests = contests_of(read_folders([tmp_path]))
    assert [[e.number for e in contest.entrants] for contest in contests] == [
        ["0", "3"],
        ["1"],
        ["2"],
    ]


def test_a_machine_whose_speed_changed_is_named(tmp_path):
    def limits(rate, step):
        link = {"bytes_per_s": {"median": rate}}
        return {"limits": {"link": link, "resident": {"tpot_s": {"median": step}}}}

    jobs = [made(1, 1, 1, cache="lru"), made(1, 1, 1, cache="lfu")]
    for number, (job, step) in enumerate(zip(jobs, (1, 3), strict=True)):
        write(tmp_path / "set" / str(number), job | limits(1e9, step))
    told = warnings(contests_of(read_folders([tmp_path / "set"]))[0])
    assert [line for line in told if "resident" in line and "3.0-fold" in line]
    assert not [line for line in told if "link" in line]
