"""What a shell offers for the word under the cursor: groups, options and keys.

Hydra and the parts behind the options take seconds to import, so the YAML files are read as they
lie there. Bash cuts words at "=": of `cache=l` it asks for `l`, and wants the rest of that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer

CONF = Path(__file__).parent.parent / "conf"
PRESETS = "experiment"
INSPECTED = ("model", "prefill")
NOT_KEYS = ("_target_", "defaults")


def complete_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the argument OVERRIDES: `ca` -> `cache=`, `cache=l` -> `cache=lru`, `cache.` -> keys."""
    return _completed(_words(ctx), incomplete, (*_choices(), PRESETS, *_root()))


def complete_inspected(ctx: typer.Context, incomplete: str) -> list[str]:
    """For `residency inspect`: options of the group model, and keys that sizes depend on."""
    names = [name for name in _options("model") if name.startswith(incomplete)]
    return [*names, *_completed(_words(ctx), incomplete, INSPECTED)]


def _words(ctx: typer.Context) -> list[str]:
    given = [value for value in ctx.params.values() if isinstance(value, (list, tuple))]
    return [str(word) for value in given for word in value]


def _completed(words: Sequence[str], incomplete: str, heads: Sequence[str]) -> list[str]:
    """What `incomplete` may become. words: those before it, as the shell has cut them."""
    *before, last = ["", *_joined(words)]
    cut = last if last.endswith("=") else f"{last}=" if _is_key(last) else ""
    text = cut + incomplete
    if not cut:
        before.append(last)
    found = [each for each in _candidates(text, before, heads) if each.startswith(text)]
    return [each.removeprefix(cut) for each in found if each != cut]


def _joined(words: Sequence[str]) -> list[str]:
    """Words as they were before a shell cut them at "="."""
    joined: list[str] = []
    for word in words:
        if joined and (word == "=" or joined[-1].endswith("=")):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _is_key(word: str) -> bool:
    """Whether a word before the cursor is one that "=" was cut from; a prompt is hardly one."""
    return word.partition(".")[0] in (*_choices(), PRESETS, *_root())


def _candidates(text: str, words: Sequence[str], heads: Sequence[str]) -> Iterator[str]:
    """Two where one would do: a shell ends a word with a space if there is no choice."""
    key, equals, value = text.partition("=")
    group, dot, _ = key.partition(".")
    if group not in heads:
        for head in heads:
            yield from _begun(head)
    elif dot or group in _root():
        keys = {name: own for name, own in _keys(group, words).items() if name.startswith(key)}
        for name, default in keys.items():
            yield f"{name}="
            if equals or len(keys) == 1:
                yield from (f"{name}={value}" for value in _values(default))
    elif equals:
        done = value[: value.rfind(",") + 1]  # of a sweep's several options
        yield from (f"{key}={done}{name}" for name in _options(key))
    else:
        yield from _begun(group)


def _begun(head: str) -> Iterator[str]:
    if head in _root():
        yield from (f"{head}={value}" for value in _values(_root()[head]))
    elif head == PRESETS:
        yield from (f"{head}={name}" for name in _options(head))
    else:
        yield from (f"{head}=", f"{head}.")


def _keys(group: str, words: Sequence[str]) -> dict[str, Any]:
    """Defaults by key, of the option that the line chooses, or of the root's."""
    if group in _root():
        return _leaves(group, _root()[group])
    chosen = [word.partition("=")[2] for word in words if word.startswith(f"{group}=")]
    name = [_choices().get(group, ""), *chosen][-1]
    node = _read(_options(group).get(name.rpartition(",")[2]))
    return {f"{group}.{key}": value for key, value in node.items() if key not in NOT_KEYS}


def _leaves(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    nested = [_leaves(f"{key}.{name}", own) for name, own in value.items()]
    return {name: own for leaves in nested for name, own in leaves.items()}


def _values(default: Any) -> list[str]:
    """What may stand behind a key: both truths, else its default where that is one plain word."""
    if isinstance(default, bool):
        return ["true", "false"]
    text = str(default)
    return [text] if text and text.replace("%", "").replace(".", "").isalnum() else []


@lru_cache
def _choices() -> dict[str, str]:
    """The default option of each group."""
    entries = [entry for entry in _primary()["defaults"] if isinstance(entry, dict)]
    return {group: name for entry in entries for group, name in entry.items() if name is not None}


@lru_cache
def _root() -> dict[str, Any]:
    return {key: value for key, value in _primary().items() if key not in NOT_KEYS}


@lru_cache
def _primary() -> dict[str, Any]:
    return _read(CONF / "config.yaml")


def _options(group: str) -> dict[str, Path]:
    """The YAML file of each option, plugins' included."""
    files = [file for folder in (CONF, *_plugins()) for file in (folder / group).glob("*.yaml")]
    return {file.stem: file for file in sorted(files)}


def _plugins() -> Iterator[Path]:
    """Folders of plugins' options; none of their code is imported."""
    for point in entry_points(group="residency.conf"):
        top, *below = point.value.split(".")
        spec = importlib.util.find_spec(top)
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location, *below)


def _read(file: Path | None) -> dict[str, Any]:
    """Nothing of a file that is not there or not YAML: a shell has no place for errors."""
    import yaml

    try:
        node = yaml.safe_load(file.read_text()) if file else {}
    except (OSError, yaml.YAMLError):
        return {}
    return node if isinstance(node, dict) else {}
