"""Hydra's other launchers, for real: a job each in two processes."""

import json

import pytest
from command import residency
from sweeping import results, tiny

TWO = ("cache=lru,lrfu", "cache.slots=12", "--no-routes", "--json")


@pytest.fixture(autouse=True)
def single_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def swept(checkpoint, folder, *words):
    told = residency("sweep", *TWO, *tiny(checkpoint), *words, "--out", folder)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout.splitlines()[-1])["counts"]["done"] == 2
    assert set(results(folder)) == {"0", "1"}


def test_joblib(checkpoint, tmp_path):
    loky = pytest.importorskip("joblib.externals.loky")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    swept(checkpoint, tmp_path / "s", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    loky.get_reusable_executor().shutdown(wait=True)


def test_submitit_on_this_machine(checkpoint, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5")
    swept(checkpoint, tmp_path / "s", *words)


@pytest.mark.filterwarnings("ignore:::ray.*")
def test_ray_on_two_workers(checkpoint, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    try:
        swept(
            checkpoint,
            tmp_path / "s",
            "hydra/launcher=ray",
            "+hydra.launcher.ray.remote.num_cpus=1",
        )
    finally:
        ray.shutdown()
