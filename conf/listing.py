"""The catalogue as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from residency.conf.catalog import MATRIX_GROUPS, Cell, Option


def options_table(options: Iterable[Option]) -> Table:
    """One row an option."""
    table = Table("group", "name", "what it does", "parameters")
    for option in options:
        keys = ", ".join(p.key for p in option.parameters)
        table.add_row(option.group, option.name, option.summary, keys or "-")
    return table


def parameter_tables(option: Option) -> Iterator[Table]:
    """The option's parameters, if it has any."""
    table = Table("parameter", "default", "meaning")
    for parameter in option.parameters:
        key = f"{option.group}.{parameter.key}"
        table.add_row(key, str(parameter.default), parameter.meaning)
    if option.parameters:
        yield table


def matrix_table(cells: Iterable[Cell]) -> Table:
    """One row a combination, with its verdict."""
    table = Table(*MATRIX_GROUPS, "verdict")
    for cell in cells:
        verdict = "\n".join(map(str, cell.conflicts)) or "works"
        table.add_row(*cell.choices.values(), verdict)
    return table
