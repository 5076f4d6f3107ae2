"""What every command shares: the consoles, how user errors end, and common options.

Imports nothing heavy: the help of a command must come at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from residency.commands.completion import complete_overrides

USAGE_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Choices and keys in Hydra's syntax, e.g. cache=lrfu cache.decay=0.1",
        autocompletion=complete_overrides,
        show_default=False,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="The text to continue; several are decoded together."
    ),
]
PromptFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-file",
        "-f",
        metavar="FILE",
        help="Read the prompt from a file; - is stdin, .jsonl has one a line.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Begin with this config, as --cfg or a result has it; overrides come on top.",
    ),
]
Cfg = Annotated[bool, typer.Option("--cfg", help="Print the composed config and stop.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write result.json and config.yaml there."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a result in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@contextmanager
def user_errors() -> Iterator[None]:
    """One clear line, and exit status 2 for what a user can mend, 130 for ctrl-C, 143 for SIGTERM.

    Whatever ends it, files are whole or as they were.
    """
    from residency.policies.errors import ResidencyError
    from residency.runtime.interrupts import Terminated, termination

    try:
        with termination():
            yield
    except ResidencyError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE_ERROR) from None
    except Terminated:
        err.print("\nterminated: no file was left half written")
        raise typer.Exit(TERMINATED) from None
    except KeyboardInterrupt:
        err.print("\ninterrupted: no file was left half written")
        raise typer.Exit(INTERRUPTED) from None
