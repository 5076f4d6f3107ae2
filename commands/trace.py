"""`residency trace`: record, import and look at routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from residency.commands.terminal import Json, Overrides, err, out, user_errors

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Record, import and look at routes: where each token went. `residency replay` tries other "
    "caches on them.",
)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The trace, named .safetensors or .npz.")
]
Replace = Annotated[bool, typer.Option("--force", help="Replace FILE.")]


@app.command()
def record(
    file: File,
    overrides: Overrides = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="A text to continue; several follow one another."
        ),
    ] = None,
    prompt_files: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt-file",
            "-f",
            metavar="FILE",
            help="Read the prompt from a file; - is stdin, .jsonl has one a line.",
        ),
    ] = None,
    force: Replace = False,
    as_json: Json = False,
) -> None:
    """Run prompts one after the other and write down where each token was routed.

    * `residency trace record routes.safetensors -p "ROMEO:" -p "JULIET:" cache.slots=25%`
    * `residency trace record routes.safetensors -f prompts.jsonl model=folder model.path=models/X`
    """
    with user_errors():
        from residency.conf import build_engine
        from residency.conf.progress import loading_bar
        from residency.conf.tracing import check_file, compose_record, told
        from residency.conf.tracing import record as recorded
        from residency.policies.errors import ConfigError

        check_file(file, force)
        configs = compose_record(overrides or [], prompts or [], prompt_files or [])
        for conflict in configs[0].conflicts():
            raise ConfigError(str(conflict))
        with loading_bar(err) as progress, build_engine(configs[0], progress) as engine:
            trace = recorded(configs, engine, file)
        out.print(json.dumps(told(trace, file)) if as_json else _line(told(trace, file)))


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="An .npz, .npy or .jsonl, or SGLang's .pt.")
    ],
    file: File,
    domains: Annotated[
        str | None,
        typer.Option("--domains", metavar="FILE", help="A JSON list of names, one a request."),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(
            "--experts", metavar="N", help="Experts of a layer; if not given, the highest id + 1."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", help="MoE layers, for routes in a flat list."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="N", help="Experts of a token, for routes in a flat list."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="N",
            help="Tokens of each request that are its prompt, where the source tells no phases.",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            "--chunk-tokens", metavar="N", help="Tokens of a chunk; prompts are cut into chunks."
        ),
    ] = 8192,
    admit_tokens: Annotated[
        int,
        typer.Option(
            "--admit-tokens", metavar="N", help="Tokens of the longest chunk that enters the slots."
        ),
    ] = 256,
    force: Replace = False,
    as_json: Json = False,
) -> None:
    """Turn what another recorder wrote into a trace file.

    The source's name tells its kind: numpy arrays, JSON lines, or SGLang's recorder.

    * `residency trace import routed_experts.npy routes.safetensors --prompt-tokens 512`
    """
    with user_errors():
        from residency.conf.tracing import check_file, import_file, told

        check_file(file, force)
        trace = import_file(
            source,
            file,
            domains,
            experts=experts,
            layers=layers,
            top_k=top_k,
            prompt_tokens=prompt_tokens,
            chunk_tokens=chunk_tokens,
            admit_tokens=admit_tokens,
        )
        out.print(json.dumps(told(trace, file)) if as_json else _line(told(trace, file)))


@app.command()
def info(file: File, as_json: Json = False) -> None:
    """Show reuse, stack distances, unions of experts, skew, and how they shift.

    * `residency trace info routes.safetensors`
    """
    with user_errors():
        from residency.runtime.traces import read
        from residency.runtime.traces.info import info_of
        from residency.runtime.traces.tables import info_tables

        trace = read(file, "")
        found = info_of(trace)
        if as_json:
            print(json.dumps(found.as_dict()))
            return
        out.print(*info_tables(found, trace, file.name), sep="\n")


def _line(told: dict[str, object]) -> str:
    return "{file}: {tokens:,} tokens in {steps:,} steps, {shape}, {bytes:,} bytes".format(**told)
