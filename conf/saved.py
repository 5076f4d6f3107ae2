"""A config that was written before: `--config FILE`.

FILE holds a tree as `--cfg` prints it and as config.yaml beside a result has it, or is a
result.json with such a tree as its `config`. It takes the place of config.yaml: its choices and
values are what overrides, and presets among them, come on top of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from residency.conf.build import build_part
from residency.conf.options import (
    CONFIG_NAME,
    GROUPS,
    composed,
    hydra,
    option_names,
    option_node,
    suggestion,
)
from residency.conf.root import ROOT_KEYS, build_root
from residency.conf.schema import escaped
from residency.policies.errors import ConfigError

NAME = "residency_saved"  # of the primary config and of its options, while Hydra composes them


@dataclass(frozen=True)
class Saved:
    """What a file holds. groups: each one's keys, `_target_` among them. root: the root keys.

    options: the option of each group that has that `_target_`; none for a class of one's own.
    """

    file: Path
    groups: dict[str, dict[str, Any]]
    root: dict[str, Any]
    options: dict[str, str]

    def without(self, group: str, *keys: str) -> Saved:
        """The same, but for some keys of a group, which then have their defaults."""
        node = {key: value for key, value in self.groups.get(group, {}).items() if key not in keys}
        return replace(self, groups=self.groups | ({group: node} if node else {}))

    def override(self, group: str, name: str) -> str:
        """The override that chooses an option: the file's own keys, where the choice is the same.

        Another option has its own defaults.
        """
        return f"{group}={NAME if self.options.get(group) == name else name}"

    @contextmanager
    def stored(self) -> Iterator[str]:
        """Inside, Hydra knows a primary config of the yielded name that is this one."""
        with hydra():
            store = ConfigStore.instance()
            before = store.repo
            store.repo = {k: dict(v) if isinstance(v, dict) else v for k, v in before.items()}
            try:
                for group, node in self.groups.items():
                    store.store(NAME, OmegaConf.create(escaped(node)), group=group)
                primary = OmegaConf.load(str(files("residency.conf") / f"{CONFIG_NAME}.yaml"))
                for entry in primary.defaults:
                    if isinstance(entry, DictConfig):
                        entry.update({group: NAME for group in entry if group in self.groups})
                store.store(NAME, OmegaConf.merge(primary, escaped(self.root)))
                yield NAME
            finally:
                store.repo = before


def read_saved(file: Path) -> Saved:
    """Raises ConfigError, in one line with the file's name, for what is no such tree."""
    tree = _tree(file)
    for key in tree:
        if key not in (*GROUPS, *ROOT_KEYS):
            known = suggestion(str(key), (*GROUPS, *ROOT_KEYS))
            raise ConfigError(f"{file}: {key}: there is no such config group or key; {known}")
    groups = {group: tree[group] for group in GROUPS if group in tree}
    if not groups:
        raise ConfigError(f"{file}: it holds no config; write one with --cfg")
    for group, node in groups.items():
        if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
            raise ConfigError(
                f"{file}: {group}: it has no _target_, so its keys may be those of any option; "
                "take the whole tree that --cfg prints"
            )
    options = _options({group: node["_target_"] for group, node in groups.items()})
    saved = Saved(file, groups, {key: tree[key] for key in ROOT_KEYS if key in tree}, options)
    try:
        build_root(saved.root)
        for group in options:
            build_part(group, groups[group])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return saved


def _tree(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{file}: cannot be read ({reason})") from error
    try:
        loaded: Any = json.loads(text)  # quickly, where it is that; a result may be long
    except (ValueError, RecursionError):
        loaded = None
    if isinstance(loaded, dict) and "config" in loaded:
        tree = loaded["config"]  # as the parts have it: nothing is escaped
    elif isinstance(loaded, dict) and "kind" in loaded:
        raise ConfigError(f"{file}: this result holds no config; take the config.yaml beside it")
    else:
        tree = _resolved(file, text)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: not a mapping of config groups; write one with --cfg")
    return tree


def _resolved(file: Path, text: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: not the YAML of a config ({reason})") from error


def _options(targets: Mapping[str, str]) -> dict[str, str]:
    """The option of each group that has its target, of those that have one."""
    named = {group: target.split(".")[-2:-1] for group, target in targets.items()}
    likely = {g: n[0] for g, n in named.items() if n and n[0] in option_names(g)}  # by modules
    tree = composed([f"{group}={name}" for group, name in likely.items()])
    found = {g: n for g, n in likely.items() if tree[g].get("_target_") == targets[g]}
    for group in set(targets) - set(found):
        for name in option_names(group):
            if option_node(group, name).get("_target_") == targets[group]:
                found[group] = name
    return found
