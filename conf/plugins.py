"""Plugins: packages that bring config groups, declared by the entry point group `residency.conf`.

An entry point's value is the package that holds the YAML files, e.g. `my_policies.conf`; its
top-level package may then be a `_target_`.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from importlib.metadata import entry_points

from residency.policies.errors import ConfigError

ENTRY_POINTS = "residency.conf"
OWN_PREFIX = "residency"


@lru_cache
def config_packages() -> tuple[str, ...]:
    """The plugins' config packages. Raises ConfigError for one that cannot be found."""
    points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    for point in points:
        if not _exists(point.value):
            raise ConfigError(
                f"plugin {point.name}: its config package {point.value} is not installed; "
                "reinstall or remove the plugin"
            )
    return tuple(point.value for point in points)


def search_path_override() -> list[str]:
    """The Hydra override that makes the plugins' groups visible, if there are plugins."""
    packages = config_packages()
    paths = ",".join(f"pkg://{package}" for package in packages)
    return [f"hydra.searchpath=[{paths}]"] if packages else []


def target_prefixes() -> tuple[str, ...]:
    """Top-level packages from which parts may be built."""
    return (OWN_PREFIX, *(package.partition(".")[0] for package in config_packages()))


def _exists(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
