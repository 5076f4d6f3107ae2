"""The one door to Hydra's launchers, and to the names that Hydra gives folders.

The grid is made beforehand, so that Hydra's sweeper is not asked: a launcher gets the jobs that are
left, each with its own overrides and its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from residency.conf.compose import accepted
from residency.conf.options import CONFIG_NAME, hydra, suggestion
from residency.conf.plugins import search_path_override
from residency.policies.errors import ConfigError
from residency.sweeps.manifest import Job, Words
from residency.sweeps.settings import FOLDER, JOB_FOLDER, LAUNCHER, Settings, literal
from residency.sweeps.task import Task

EXTRAS = {  # of this package, by launcher
    "joblib": "joblib",
    "ray": "ray",
    "ray_aws": "ray",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
}
QUIET = (  # the job's folder is as `--out` writes it, and the progress display is all that is shown
    "hydra.output_subdir=null",
    "hydra/hydra_logging=none",
    "hydra/job_logging=none",
    "hydra.job.name=residency",
)


class LaunchError(ConfigError):
    """A launcher that broke off."""


def check_launcher(settings: Settings) -> None:
    """Raises ConfigError for a launcher that is not there, or keys that it does not take."""
    with hydra() as instance:
        loader = instance.config_loader()
        names = sorted(loader.get_group_options(LAUNCHER, ObjectType.CONFIG))
    if settings.launcher not in names:
        if extra := EXTRAS.get(settings.launcher):
            what = f"it is not installed; pip install 'residency[{extra}]'"
        else:
            what = f"there is no such launcher; {suggestion(settings.launcher, names)}"
        raise ConfigError(f"{LAUNCHER}={settings.launcher}: {what}")
    with _master(settings):
        pass


def sweep_folder(settings: Settings) -> Path:
    """Where Hydra puts the sweep. Raises ConfigError."""
    with _master(settings) as config, _one_line(FOLDER):
        return Path(str(config.hydra.sweep.dir)).absolute()


def job_folders(settings: Settings, jobs: Sequence[Words]) -> list[str]:
    """What Hydra calls each job's folder: its number, or what hydra.sweep.subdir says.

    Raises ConfigError where two jobs would share one, or one lies outside of the sweep's.
    """
    if not settings.names_jobs:
        return [str(number) for number in range(len(jobs))]
    with _master(settings) as config, _one_line(JOB_FOLDER):
        names = [_job_folder(config, job, number) for number, job in enumerate(jobs)]
    for name in names:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts or name in ("", "."):
            raise ConfigError(f"{JOB_FOLDER}: {name!r} is not a folder within the sweep's")
    if len(set(map(PurePath, names))) < len(names):
        raise ConfigError(
            f"{JOB_FOLDER}: two jobs would share a folder; put ${{hydra.job.num}} into it"
        )
    return names


def launch(settings: Settings, jobs: Sequence[Job], task: Task) -> None:
    """Have the launcher run `task` for each job. Raises LaunchError where it breaks off."""
    with _master(settings) as config:
        context = _context()
        overrides = [[*accepted(job.overrides), literal(JOB_FOLDER, job.folder)] for job in jobs]
        try:
            launcher = Plugins.instance().instantiate_launcher(context, task, config)
            launcher.launch(overrides, initial_job_idx=0)
        except Exception as error:  # whatever a launcher, or what it starts, may raise
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise LaunchError(f"{LAUNCHER}={settings.launcher}: broke off ({reason})") from error


@contextmanager
def _master(settings: Settings) -> Iterator[DictConfig]:
    """The config of a sweep before its first job, inside of Hydra."""
    words = [*search_path_override(), *settings.launching, *settings.folders, *QUIET]
    with hydra():
        with _one_line(" ".join(settings.launching) or LAUNCHER):
            config = GlobalHydra.instance().hydra.compose_config(  # type: ignore[union-attr]
                CONFIG_NAME, words, run_mode=RunMode.MULTIRUN, with_log_configuration=False
            )
        yield config


def _context() -> HydraContext:
    return HydraContext(
        config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks(None)
    )


def _job_folder(master: DictConfig, job: Words, number: int) -> str:
    config: Any = _context().config_loader.load_sweep_config(master, accepted(job))
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)
    outer = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        return str(OmegaConf.select(config, JOB_FOLDER))
    finally:
        HydraConfig.instance().cfg = outer


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error
