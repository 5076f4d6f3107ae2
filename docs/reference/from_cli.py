"""The page of the commands, from the typer application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from tables import MADE, escaped, table

from residency.cli import app
from residency.commands.panels import PANELS

INTRO = """
Every command takes `--help`. Exit status: 0 if all went well, 2 with one line on stderr for what a
user can mend, 130 for an interrupt. OVERRIDES are choices and keys of the [config](config.md).
"""


def cli_page() -> str:
    command = typer.main.get_command(app)
    found = dict(_commands(command, "residency"))
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    rows = [
        (
            f"[`{name}`](#{name.replace(' ', '-')})",
            panels.get(name.split()[1], ""),
            _first(each.help),
        )
        for name, each in found.items()
    ]
    parts = ["# Command line", MADE, INTRO.strip()]
    parts.append(table(("command", "about", "what it does"), rows))
    for name, each in found.items():
        parts += _command(name, each)
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each command and group of commands below `command`, as help lists them."""
    for each in command.list_commands(None):
        inner = command.commands[each]
        yield f"{name} {each}", inner
        if hasattr(inner, "commands"):
            yield from _commands(inner, f"{name} {each}")


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}"
    yield command.help.strip()
    if hasattr(command, "commands"):
        return
    params = [param for param in command.params if "--help" not in param.opts]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    words = [_word(param) for param in arguments]
    yield f"```text\n{' '.join([name, '[OPTIONS]', *words])}\n```"
    if arguments:
        rows = [(f"`{_placeholder(param)}`", escaped(param.help)) for param in arguments]
        yield table(("argument", "meaning"), rows)
    rows = [(_spelling(param), _default(param), escaped(param.help)) for param in options]
    yield table(("option", "default", "meaning"), rows)


def _word(param: Any) -> str:
    text = _placeholder(param)
    if text.endswith("]"):  # tells by itself what may be left out
        return text
    text = text if param.required else f"[{text}]"
    return f"{text}..." if param.nargs == -1 else text


def _placeholder(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _spelling(param: Any) -> str:
    value = "" if param.is_flag else f" {_placeholder(param)}"
    several = ", may be repeated" if param.multiple else ""
    needed = ", required" if param.required else ""
    return ", ".join(f"`{opt}{value}`" for opt in param.opts) + several + needed


def _default(param: Any) -> str:
    return "" if param.is_flag or not param.default else f"`{param.default}`"


def _first(text: str) -> str:
    """The first paragraph of a help text, as its summary."""
    return escaped(text.partition("\n\n")[0])
