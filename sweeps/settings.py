"""What a sweep takes of Hydra's own settings: the launcher, and the folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.types import Override

from residency.conf.compose import parsed
from residency.conf.schema import escaped
from residency.policies.errors import ConfigError

LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"
BASIC = "basic"
FOLDER, JOB_FOLDER = "hydra.sweep.dir", "hydra.sweep.subdir"
KNOWN = f"{LAUNCHER}=NAME, hydra.launcher.KEY=..., hydra.sweep.dir=... and hydra.sweep.subdir=..."


@dataclass(frozen=True)
class Settings:
    """Hydra's overrides of a sweep. launching: of the launcher. folders: of where it writes."""

    launcher: str = BASIC
    launching: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def into(self, folder: Path) -> Settings:
        """The same with another folder of the sweep."""
        others = [word for word in self.folders if not word.startswith(f"{FOLDER}=")]
        return replace(self, folders=(*others, literal(FOLDER, str(folder))))

    @property
    def names_jobs(self) -> bool:
        return any(word.startswith(f"{JOB_FOLDER}=") for word in self.folders)


def literal(key: str, text: str) -> str:
    """An override that gives `key` this very text."""
    quoted = str(escaped(text)).replace("'", "\\'")
    return f"{key}='{quoted}'"


def split(overrides: Sequence[str]) -> tuple[Settings, list[str]]:
    """Hydra's settings, and the overrides that make the grid. Raises ConfigError."""
    launcher, launching, folders, rest = BASIC, [], [], []
    for text, override in zip(overrides, parsed(overrides), strict=True):
        key = override.key_or_group
        if key.partition(".")[0].partition("/")[0] != "hydra":
            rest.append(text)
        elif _value(override, text) is not None and key == LAUNCHER:
            launcher = str(override.value())
            launching.append(text)
        elif key.startswith("hydra.launcher."):
            launching.append(text)
        elif key in (FOLDER, JOB_FOLDER):
            folders.append(text)
        elif key == SWEEPER:
            _check_sweeper(override, text)
        else:
            raise ConfigError(f"{text}: of Hydra's settings a sweep takes {KNOWN}")
    return Settings(launcher, tuple(launching), tuple(folders)), rest


def _value(override: Override, text: str) -> object:
    if override.is_sweep_override():
        raise ConfigError(f"{text}: a sweep has one of each of Hydra's settings; give one value")
    if override.is_delete():
        raise ConfigError(f"{text}: a setting cannot go away; leave it out")
    return override.value()


def _check_sweeper(override: Override, text: str) -> None:
    if override.value() != BASIC:
        raise ConfigError(
            f"{text}: other sweepers choose each point by the results before it, and a sweep lists "
            f"all of its points before it runs one; leave it out, or take {SWEEPER}={BASIC}"
        )
