"""What a grid makes of overrides, held against brute force over what `compose` says of points."""

import itertools
import json

import pytest
from command import assert_refused, residency

from residency.conf import compose
from residency.conf.catalog import describe
from residency.conf.options import hydra, option_names
from residency.policies.errors import ConfigError
from residency.sweeps.expansion import MOST_POINTS, points
from residency.sweeps.grid import grid_of, identity

CPU = "device=cpu"
AXES = {
    "cache": ["lru", "lrfu", "none"],
    "cache.decay": ["0.03", "0.1"],
    "prefill": ["always_stream", "demand"],
    "prefill.max_tokens": ["128", "512"],
}


def known(group, name):
    return {
        parameter.key.partition(".")[2] or parameter.key
        for parameter in describe(group, name).parameters
    }


KEYS = {(group, name): known(group, name) for group in ("cache", "prefill") for name in AXES[group]}


def expected(axes):
    """By each point's choices: whether it works, and the combination that it is."""
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        chosen = {group: point.get(group, default) for group, default in DEFAULTS.items()}
        kept = [
            f"{key}={value}"
            for key, value in point.items()
            if "." not in key
            or key.split(".")[1] in KEYS[key.split(".")[0], chosen[key.split(".")[0]]]
        ]
        config = compose([CPU, "workload=bench", *kept])
        yield tuple(kept), identity(config), not list(config.conflicts())


DEFAULTS = {"cache": "lrfu", "prefill": "demand"}


def test_each_point_runs_once_or_is_skipped_or_is_another():
    with hydra():
        told = list(expected(AXES))
        grid = grid_of([CPU, *(f"{key}={','.join(values)}" for key, values in AXES.items())])
    works = [same for _, same, sound in told if sound]
    assert [identity(point.config) for point in grid.points] == list(dict.fromkeys(works))
    assert len(grid.skipped) == sum(not sound for _, _, sound in told) > 0
    assert all(one.reasons for one in grid.skipped)
    assert len(grid.points) + len(grid.skipped) + len(grid.duplicates) == len(told)
    kept = {same: words for words, same, _ in reversed(told)}
    for point in grid.points:
        assert {CPU, "workload=bench", *kept[identity(point.config)]} == set(point.overrides)


def test_values_come_from_commas_ranges_globs_and_choices_in_hydras_order():
    found = points(["cache=glob(l*)", "cache.slots=range(8,17,4)", "prefill=choice(demand,auto)"])
    caches = [name for name in option_names("cache") if name.startswith("l")]
    assert found == [
        (f"cache={cache}", f"cache.slots={slots}", f"prefill={prefill}")
        for cache in caches
        for slots in (8, 12, 16)
        for prefill in ("demand", "auto")
    ]


def test_quotes_lists_and_prefixes_stay_as_they_are():
    grid = grid_of(
        [
            CPU,
            "workload=generate",
            "workload.prompt='a,b','c d'",
            "++cache.slots=25%",
            "~experiment",
        ]
    )
    assert [p.config.workload.config.prompt for p in grid.points] == ["a,b", "c d"]
    lengths = grid_of([CPU, "workload.lengths=[16],[16,64]"]).points
    assert [p.config.workload.config.lengths for p in lengths] == [[16], [16, 64]]


def test_presets_are_points_and_keep_their_own_workload():
    grid = grid_of([CPU, "experiment=everything_resident,nothing_stays,short_chunk_ttft"])
    workloads = [point.config.workload.name for point in grid.points]
    assert workloads == ["bench", "bench", "prefill_modes"]
    caches = [point.config.policies.cache.name for point in grid.points]
    assert caches == ["lrfu", "none", "lrfu"]


def test_jobs_of_one_model_and_device_follow_one_another():
    grid = grid_of(["cache=lru,lrfu", "device=cpu", "device.threads=1,2"])
    told = [(p.config.device.config.threads, p.config.policies.cache.name) for p in grid.points]
    assert told == [(1, "lru"), (1, "lrfu"), (2, "lru"), (2, "lrfu")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cache=lru,lrff"], ("cache=lrff", "did you mean lrfu?")),
        (
            ["cache=lru,lrfu", "cache.decy=0.1,0.2"],
            ("cache.decy", "lrfu, lru", "did you mean decay?"),
        ),
        (["cache=lru", "cache.decay=0.1,0.2"], ("cache.decay", "(lru)")),
        (["cache.slots=1,x y z("], ("not an override",)),
        (["prefill.max_tokens=128,abc"], ("prefill.max_tokens=abc", "whole number")),
        (["chache=lru,lrfu"], ("did you mean cache?",)),
        (["cache=glob(z*)"], ("cache=glob(z*)", "no value", "lrfu")),
        (["cache.decay=interval(0,1)"], ("interval",)),
        (["cache.slots=range(1,20000)"], ("19,999 points", f"{MOST_POINTS:,}")),
        (["hydra/launcher=basic,joblib"], ("one of each",)),
        (["hydra/launcher=basc"], ("no such launcher", "did you mean basic?")),
        (["hydra/sweeper=optuna"], ("sweepers", "hydra/sweeper=basic")),
        (["hydra.verbose=true"], ("hydra.verbose=true", "hydra/launcher=NAME")),
        (["hydra.launcher.n_jobs=2"], ("n_jobs",)),
        (["cache=none", "prefill=demand"], ("no combination can work",)),
    ],
)
def test_what_is_wrong_in_itself_is_one_line(words, said):
    refused = residency("sweep", *words, "device=cpu", "--dry-run")
    assert refused.exit_code == 2, refused.output
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    for word in said:
        assert word in last


def test_a_launcher_that_is_not_installed_names_what_to_install(monkeypatch):
    from residency.sweeps import launching

    monkeypatch.setitem(launching.EXTRAS, "slurm_of_tomorrow", "ray")
    refused = residency("sweep", "hydra/launcher=slurm_of_tomorrow", "device=cpu", "--dry-run")
    assert_refused(refused, "not installed", "pip install 'residency[ray]'")


SIX = ("cache=lru,none", "prefill=demand,always_stream", "cache.slots=8,16", CPU)


def test_dry_runs_list_jobs_skipped_and_duplicates(tmp_path):
    told = residency("sweep", *SIX, "--dry-run", "--out", tmp_path / "s")
    assert told.exit_code == 0
    assert not (tmp_path / "s").exists()
    assert "2 of 8 combinations cannot work" in told.stderr
    assert told.stderr.count("mend it with cache=lru") == 1
    assert "0: cache=lru prefill=demand cache.slots=8" in told.stdout
    assert "cache.slots=16: as job" in told.stdout
    listed = json.loads(residency("sweep", *SIX, "--dry-run", "--json").stdout)
    assert [len(listed[key]) for key in ("jobs", "skipped", "duplicates")] == [5, 2, 1]


def test_a_strict_sweep_runs_nothing_where_a_combination_cannot_work(tmp_path):
    refused = residency("sweep", *SIX, "--strict", "--out", tmp_path / "s")
    assert refused.exit_code == 2
    assert "error: --strict: 2 combinations cannot work" in refused.stderr
    assert not (tmp_path / "s").exists()


def test_too_long_a_prompt_never_reaches_a_worker():
    grid = grid_of(
        [
            CPU,
            "model.context=64",
            "workload.decode_context=8",
            "workload.decode_tokens=4",
            "workload.lengths=[16],[16,64]",
        ]
    )
    assert len(grid.points) == 1
    (skipped,) = grid.skipped
    assert "raise model.context" in skipped.reasons[0].reason


def test_compose_alone_still_takes_one_value_of_a_key():
    with pytest.raises(ConfigError, match="several values"):
        compose(["cache=lru,lrfu"])
