"""`residency policies`: list them, show one, or begin one of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from residency.commands.terminal import Json, out, user_errors

if TYPE_CHECKING:
    from residency.conf.catalog import Option

SHOW = "show"


class ShowsByDefault(TyperGroup):
    """A word that is no command of the group is the policy that `show` shows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completing = ctx.resilient_parsing and not args
        if not completing and (not args or args[0] not in (*self.commands, "--help")):
            args = [SHOW, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=ShowsByDefault,
    rich_markup_mode="markdown",
    help="List the policies of every group, show one, or begin one of your own.\n\n"
    "A name alone shows that policy with its parameters and what it refuses.\n\n"
    "* `residency policies`\n* `residency policies lrfu`\n"
    "* `residency policies new count --kind cache`",
)


@app.command(SHOW)
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this one, e.g. lrfu or cache/lrfu.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the policies of every group, or show one with its parameters and what it refuses.

    The word `show` may be left out: `residency policies lrfu`.
    """
    with user_errors():
        from residency.conf.catalog import policies_named

        options = policies_named(name)
        if as_json:
            from dataclasses import asdict

            print(json.dumps([asdict(option) for option in options], default=str))
        elif name is None:
            from residency.conf.listing import options_table

            out.print(options_table(options))
        else:
            for option in options:
                _show_option(option)


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What the option is called: cache=NAME.")
    ],
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="cache, prefill or decode.")],
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Write the package there, not into ./NAME."),
    ] = None,
) -> None:
    """Write a package with a small policy that works: class, YAML, tests, entry point.

    Installed, it is an option like any other.

    * `residency policies new count --kind cache`
    * `pip install -e count`
    * `residency run cache=count`
    """
    with user_errors():
        from residency.conf.scaffold import write_package

        target = folder or Path(name)
        for file in write_package(name, kind, target):
            print(file)
        print(f"pip install -e {target}; then {kind}={name} is there, and pytest {target} tests it")


def _show_option(option: Option) -> None:
    from residency.conf.listing import parameter_tables

    out.print(f"[bold]{option.group}={option.name}[/bold]\n")
    out.print(option.text, markup=False)
    for table in parameter_tables(option):
        out.print(table)
    for reason in option.refuses:
        out.print(f"refused {reason}", markup=False)
