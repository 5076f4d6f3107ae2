"""`residency plan`: what fits, what it is expected to take, and the config to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from residency.commands.terminal import Force, Json, out, user_errors

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [OVERRIDES]",
        help="A model folder, an option of the group model, or overrides; what they say is kept, "
        "the rest is chosen.",
        show_default=False,
    ),
]


def plan(
    words: Words = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", help="E.g. 24GiB; else what is free here.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="E.g. 64GiB; else what is free here.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured",
            help="A result of `residency bench` of this model on the machine; more of them add "
            "what the first lacks.",
        ),
    ] = None,
    machine: Annotated[
        Path | None, typer.Option("--machine", help="A profile that `residency doctor` wrote.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the config there, as YAML.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say what fits, with the numbers, what it is predicted to take, and which config to run.

    Reads configs and headers alone: `residency plan ~/models/Qwen3-30B-A3B --gpu-memory 24GiB
    --out plan.yaml`. Exit status 2 if it does not fit, with the key to change.
    """
    with user_errors():
        from residency.conf.planning import Planner
        from residency.conf.resources import Asked
        from residency.policies.errors import OutputError
        from residency.runtime.forecast.tables import heading, plan_lines, plan_tables
        from residency.runtime.results import require_writable, write_whole

        if file is not None:
            require_writable(file, "--out")
            if file.exists() and not force:
                raise OutputError(f"--out {file}: is there already; name another, or add --force")
        asked = Asked(words or [], gpu_memory, host_memory, measured or [], machine)
        advice, config = Planner(asked).advise()
        if file is not None:
            write_whole({file: config.yaml().encode()}, "--out")
        if as_json:
            print(json.dumps(advice.as_dict() | {"config": config.tree}))
            return
        out.print(heading(advice), markup=False, soft_wrap=True)
        out.print(*plan_tables(advice), sep="\n")
        for line in plan_lines(advice):
            out.print(line, markup=False, soft_wrap=True)
        if file is not None:
            out.print(f"config: {file}", markup=False, soft_wrap=True)
        else:
            out.print("the config as a file: add --out plan.yaml", markup=False)
