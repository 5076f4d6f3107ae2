"""The options of every config group, plugins' included, and help for a misspelt one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from residency.conf.plugins import search_path_override
from residency.policies.errors import ConfigError

GROUPS = ("model", "cache", "prefill", "decode", "device", "workload")
PRESETS = "experiment"
CONFIG_NAME = "config"

_one_at_a_time = threading.RLock()  # Hydra keeps its state in a process-wide singleton


@contextmanager
def hydra() -> Iterator[GlobalHydra]:
    """Hydra, set up for residency's configs, to this thread alone.

    Options are looked up once inside; the next time they may be others.
    """
    with _one_at_a_time:
        if GlobalHydra().is_initialized():  # already inside
            yield GlobalHydra.instance()
            return
        with initialize_config_module("residency.conf", version_base="1.3"):
            try:
                yield GlobalHydra.instance()
            finally:
                _option_names.cache_clear()
                _option_node.cache_clear()


def option_names(group: str) -> list[str]:
    """The options of `group`, sorted."""
    with hydra() as instance:
        return list(_option_names(instance.config_loader(), group))


@cache
def _option_names(loader: ConfigLoader, group: str) -> tuple[str, ...]:
    names: list[str] = loader.get_group_options(
        group, ObjectType.CONFIG, config_name=CONFIG_NAME, overrides=search_path_override()
    )
    return tuple(sorted(names))


def option_node(group: str, name: str) -> dict[str, Any]:
    """One option's own keys and defaults, as plain Python, `_target_` included."""
    with hydra():
        return deepcopy(_option_node(group, name))


@cache
def _option_node(group: str, name: str) -> dict[str, Any]:
    node = composed([f"{group}={name}"])[group]
    if not isinstance(node, dict):
        raise ConfigError(f"{group}={name}: its YAML file is not a mapping")
    return {str(key): value for key, value in node.items()}


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """The whole tree under `overrides`, plain and resolved. Raises ConfigError in one line."""
    try:
        with hydra():
            config = compose(CONFIG_NAME, overrides=[*search_path_override(), *overrides])
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {reason}; plain text needs \\${{...}}") from error
    except (HydraException, YAMLError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return cast(dict[str, Any], tree)


def suggestion(word: str, known: Sequence[str]) -> str:
    """The known names, and the closest one where there is one."""
    close = get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    mean = f"; did you mean {close[0]}?" if close else ""
    return f"choose one of {', '.join(known)}{mean}"
