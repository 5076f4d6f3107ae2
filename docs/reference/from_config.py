"""The page of the config groups, from their YAML files and their classes' typed configs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from tables import MADE, escaped, table

from residency.conf.build import build_part, part_class
from residency.conf.catalog import MATRIX_GROUPS, meanings
from residency.conf.options import GROUPS, PRESETS
from residency.policies.base import Need, Part
from residency.policies.compatibility import conflicts

CONF = Path(__file__).resolve().parents[2] / "conf"
ROOT_KEYS = "residency.conf.root"  # its class Root has the keys beside the groups
GROUP_LINE = re.compile(r"^ *- (\w+): (\w+) *# (.+)$", re.MULTILINE)
KEY_HEAD = ("key", "type", "default", "meaning")

INTRO = """
A run is one choice of each group and values of their keys. `residency run --cfg` prints the
composed config, `residency policies lrfu` shows one policy, and any of it is overridden by words
like `cache=lru cache.slots=64` ([syntax](https://hydra.cc/docs/advanced/override_grammar/basic/)).
A key that an option does not have, a value of another type and a combination that cannot work are
refused with exit status 2. Options of [plugins](../writing-a-policy.md) are not on this page:
`residency policies` lists them beside these.
"""


def config_page() -> str:
    groups = {group: (default, text) for group, default, text in _group_lines()}
    assert set(groups) == {*GROUPS, PRESETS}, "conf/config.yaml has a line for each group"
    rows = [
        (f"[`{group}`](#{group})", text, f"`{default}`" if default != "null" else "none")
        for group, (default, text) in groups.items()
    ]
    parts = ["# Config", MADE, INTRO.strip(), table(("group", "decides", "default"), rows)]
    parts += _root()
    refused = _refused_pairs()
    for group in GROUPS:
        parts += _group(group, groups[group][1], refused)
    parts += _presets(groups[PRESETS][1])
    return "\n\n".join(parts) + "\n"


def _group_lines() -> list[tuple[str, str, str]]:
    return GROUP_LINE.findall((CONF / "config.yaml").read_text())


def _names(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def _node(group: str, name: str) -> dict[str, Any]:
    """An option's keys and defaults, `_target_` included, from its own file."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    assert isinstance(node, dict), "an option's file is a mapping"
    return {str(key): value for key, value in node.items() if key != "defaults"}


def _root() -> list[str]:
    """The keys beside the groups, where there are any."""
    if find_spec(ROOT_KEYS) is None:
        return []
    rows = list(root_rows(importlib.import_module(ROOT_KEYS).Root))
    return ["## Keys of the root", "They belong to no group.", table(KEY_HEAD, rows)]


def root_rows(schema: type, where: str = "") -> Iterator[tuple[str, str, str, str]]:
    """The keys of a schema; those of a schema that a key holds have its name before theirs."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        nested = hints[field.name]
        if dataclasses.is_dataclass(nested) and isinstance(nested, type):
            yield from root_rows(nested, f"{where}{field.name}.")
        else:
            key, *others = _row(schema, {field.name: _default_of(field)}, field.name)
            yield (f"`{where}{_bare(key)}`", *others)


def _group(group: str, text: str, refused: Mapping[str, list[str]]) -> Iterator[str]:
    yield f"## {group}"
    yield f"{text[0].upper()}{text[1:]}."
    nodes = {name: _node(group, name) for name in _names(group)}
    classes = {name: part_class(group, node.pop("_target_")) for name, node in nodes.items()}
    shared = _shared(classes, nodes)
    if shared:
        rows = [
            (*_row(classes[name].Config, nodes[name], key), _those(of, list(classes)))
            for (key, of), name in shared.items()
        ]
        yield "Keys that several options have:"
        yield table((*KEY_HEAD, "options"), rows)
    common = _common_needs(classes)
    for need, of in common.items():
        those = _those(of, list(classes))
        yield f"{those[0].upper()}{those[1:]} need `{need.mend}` or the like: {need.because}."
    for name, cls in classes.items():
        yield f"### {group}={name}"
        yield escaped(_summary(name, cls))
        elsewhere = [key for key, of in shared if name in of]
        yield from _option(f"{group}={name}", cls, nodes[name], elsewhere)
        needs = [need for need in cls.needs if need not in common]
        yield from _limits(f"{group}={name}", needs, refused)


def _option(
    choice: str, cls: type[Part], node: dict[str, Any], elsewhere: Sequence[str]
) -> Iterator[str]:
    """An option's keys; elsewhere: those that the table of its group explains."""
    group, _, name = choice.partition("=")
    keys = [field.name for field in dataclasses.fields(cls.Config)]
    own = [key for key in keys if key not in elsewhere]
    if own:
        yield _keys(cls.Config, node, own)
    if not keys:
        yield "It has no keys."
    elif elsewhere:
        beside = ", ".join(f"`{key}`" for key in elsewhere)
        yield f"{'Besides' if own else 'Keys'}: {beside} ([above](#{group}))."
    if brings := _brings(group, name):
        yield "It brings along " + ", ".join(f"`{each}`" for each in brings) + "."


def _limits(choice: str, needs: Sequence[Need], refused: Mapping[str, list[str]]) -> Iterator[str]:
    """What an option needs of the others, and with which of them it never works."""
    lines = [f"- Needs `{need.mend}` or the like: {need.because}." for need in needs]
    if others := refused.get(choice):
        lines.append("- Refused with " + ", ".join(f"`{other}`" for other in others) + ".")
    if lines:
        yield "\n".join(lines)


def _common_needs(classes: Mapping[str, type[Part]]) -> dict[Need, list[str]]:
    """Needs that more than two options have, and these."""
    found: dict[Need, list[str]] = {}
    for name, cls in classes.items():
        for need in cls.needs:
            found.setdefault(need, []).append(name)
    return {need: names for need, names in found.items() if len(names) > 2}


def _those(of: Sequence[str], names: Sequence[str]) -> str:
    if len(of) == len(names):
        return "all"
    if len(of) > len(names) / 2:
        return "all but " + ", ".join(f"`{name}`" for name in names if name not in of)
    return ", ".join(f"`{name}`" for name in of)


def _shared(
    classes: Mapping[str, type[Part]], nodes: Mapping[str, dict[str, Any]]
) -> dict[tuple[str, tuple[str, ...]], str]:
    """Keys of which several options say the same, with these options; and one that has it."""
    same: dict[tuple[str, ...], list[str]] = {}
    for name, cls in classes.items():
        for field in dataclasses.fields(cls.Config):
            same.setdefault(_row(cls.Config, nodes[name], field.name), []).append(name)
    found = {
        (_bare(row[0]), tuple(names)): names[0] for row, names in same.items() if len(names) > 1
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0][1])))


def _keys(config: type, node: Mapping[str, Any], keys: Sequence[str]) -> str:
    rows = [_row(config, node, key) for key in keys]
    return table(KEY_HEAD, rows)


def _row(config: type, node: Mapping[str, Any], key: str) -> tuple[str, str, str, str]:
    (field,) = (field for field in dataclasses.fields(config) if field.name == key)
    other = field.metadata.get("option_of")
    hint = get_type_hints(config)[key]
    kind = f"option of `{other}`" if isinstance(other, str) and hint is str else _type(hint)
    meaning = meanings(config).get(key, "")
    assert meaning, f"{config.__qualname__}: its docstring does not explain {key}"
    if re.match("of (the|a) ", meaning):  # the key is what they speak of
        meaning = f"the {key.replace('_', ' ')} {meaning}"
    return f"`{key}`", kind, _value(node.get(key)), escaped(meaning)


def _bare(code: str) -> str:
    return code.strip("`")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def _type(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", ()) else hint
    return "any" if hint is Any else str(name).replace(" | ", " or ")


def _value(value: object) -> str:
    if value == MISSING:
        return "must be given"
    if isinstance(value, str) and re.fullmatch(r"[\w%./:-]+", value):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


def _brings(group: str, name: str) -> list[str]:
    """Choices of other groups in an option's defaults list."""
    defaults = OmegaConf.load(CONF / group / f"{name}.yaml").get("defaults", [])
    pairs = [pair for entry in defaults for pair in entry.items()]
    return [f"{key.partition('/')[2].partition('@')[0]}={value}" for key, value in pairs]


def _refused_pairs() -> dict[str, list[str]]:
    """For each choice, those of other groups with which every combination is refused.

    Not because of one of the two alone: such a choice works with something.
    """
    nodes = {(group, name): _node(group, name) for group in MATRIX_GROUPS for name in _names(group)}
    parts = {choice: build_part(choice[0], node) for choice, node in nodes.items()}
    of_group = [[choice for choice in nodes if choice[0] == group] for group in MATRIX_GROUPS]
    works: set[tuple[str, str]] = set()
    for cell in itertools.product(*of_group):
        if not list(conflicts([parts[choice] for choice in cell])):
            chosen = ["=".join(choice) for choice in cell]
            works |= {(one, other) for one in chosen for other in chosen}
    usable = [f"{g}={n}" for g in MATRIX_GROUPS for n in _names(g) if (f"{g}={n}",) * 2 in works]
    return {
        one: [
            other
            for other in usable
            if one.partition("=")[0] != other.partition("=")[0] and (one, other) not in works
        ]
        for one in usable
    }


def _presets(text: str) -> Iterator[str]:
    yield f"## {PRESETS}"
    yield f"{text[0].upper()}{text[1:]}; there is none by default."
    for name in _names(PRESETS):
        lines = (CONF / PRESETS / f"{name}.yaml").read_text().splitlines()
        comments = [line.lstrip("# ") for line in lines if line.startswith("# ")]
        body = [line for line in lines if not line.startswith("#")]
        yield f"### {PRESETS}={name}"
        yield escaped(" ".join(line for line in comments if not line.startswith("@package")))
        yield "```yaml\n" + "\n".join(body) + "\n```"


def _summary(name: str, cls: type[Part]) -> str:
    """The first paragraph of the docstring of an option's module."""
    text = inspect.getdoc(inspect.getmodule(cls)) or ""
    summary = " ".join(text.partition("\n\n")[0].split()).removeprefix(f"{name}: ")
    return f"{summary[0].upper()}{summary[1:]}"
