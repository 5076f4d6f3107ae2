"""The command `residency`. Thin: each subcommand composes, calls, prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residency.commands import policies, trace
from residency.commands.chat import chat
from residency.commands.completion import complete_inspected
from residency.commands.doctor import doctor
from residency.commands.panels import Panels
from residency.commands.plan import plan
from residency.commands.replay import replay
from residency.commands.report import report
from residency.commands.sweep import sweep
from residency.commands.terminal import (
    USAGE_ERROR,
    Cfg,
    ConfigFile,
    Force,
    Json,
    Out,
    Overrides,
    PromptFiles,
    Prompts,
    err,
    out,
    user_errors,
)
from residency.commands.tune import tune

if TYPE_CHECKING:
    from residency.policies.base import Conflict

app = typer.Typer(
    cls=Panels,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Compose a cache policy, a prefill mode and a decode target from config, run them on a "
    "real Mixture-of-Experts model whose experts live in host memory, and see what that cost.\n\n"
    "Begin with `residency run`: a small trained model comes with the package. Words of the form "
    "`cache=lru` or `cache.slots=64` override the config, and `residency policies` lists what "
    "there is to choose from.",
)
app.add_typer(trace.app, name="trace")
app.add_typer(policies.app, name="policies")
app.command()(chat)
app.command()(replay)
app.command()(sweep)
app.command()(tune)
app.command()(report)
app.command()(doctor)
app.command()(plan)


@app.command()
def run(
    overrides: Overrides = None,
    prompts: Prompts = None,
    prompt_files: PromptFiles = None,
    config_file: ConfigFile = None,
    cfg: Cfg = False,
    out_dir: Out = None,
    force: Force = False,
    routes: Annotated[
        Path | None,
        typer.Option(
            "--routes", metavar="FILE", help="Record there where each token is routed, for replay."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--save-state",
            metavar="FILE",
            help="Keep slots and history there, for a later run's cache.warm_start=FILE.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prefill and decode a prompt, streaming the text; ends with a table of what it cost.

    A word without "=" is taken as the prompt; several prompts are decoded together.

    * `residency run "ROMEO:" cache=lru cache.slots=25%`
    * `residency run -p "ROMEO:" -p "JULIET:"`
    * `residency run -f prompt.txt model=folder model.path=~/models/X --out runs/x`
    * `residency run profile=true --out runs/x` also writes trace.json, for ui.perfetto.dev
    """
    with user_errors():
        from residency.conf import build_engine
        from residency.conf.commands import compose_run, require_folder
        from residency.conf.outcome import result_of, write_outcome
        from residency.conf.progress import loading_bar
        from residency.runtime.prompts import check_number
        from residency.runtime.results import ResultFolder, require_writable
        from residency.runtime.state_file import require_state
        from residency.runtime.tables import print_report

        config = compose_run(overrides or [], prompts or [], prompt_files or [], config_file)
        if cfg:
            out.print(config.yaml(), end="", markup=False, soft_wrap=True)
            return
        _refuse_conflicts(list(config.conflicts()))
        require_folder(config, out_dir)
        folder = ResultFolder(out_dir, force) if out_dir else None
        if routes:
            require_writable(routes, "--routes")
            check_number(config.workload.batch, config.workload.batch, recording=True)
        if state:
            require_state(config.policies.cache, state)
        with loading_bar(err) as progress, build_engine(config, progress) as engine:
            recorder = engine.record_routes() if routes else None
            texts = config.workload.config.prompts or [config.workload.config.prompt]
            report = config.workload.run(engine, None if as_json else _printer(texts[0]))
            if state:
                engine.save_state(state)
            others = engine.runtime.profile.files()
        if recorder and routes:
            recorder.save(routes)
        if folder:
            write_outcome(config, report, folder, others)
        if as_json:
            print(json.dumps(result_of(config, report)))
            return
        print_report(out, report, texts)
        for note in report.notes:
            out.print(note, markup=False)


@app.command()
def bench(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    cfg: Cfg = False,
    out_dir: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Time prompts of several lengths and decode, beside the limits of the machine.

    Models with made-up weights are for this: they need no files. `--out` also gets chart.png.

    * `residency bench workload.lengths=[16,256]`
    * `residency bench model=qwen3_30b_a3b model.layers=24 model.routing=even --out runs/b`
    * `residency bench experiment=short_chunk_ttft`: every prefill mode over the chunk's length
    """
    with user_errors():
        from residency.conf import build_engine
        from residency.conf.commands import compose_bench
        from residency.conf.outcome import result_of, write_outcome
        from residency.conf.progress import loading_bar
        from residency.runtime.results import ResultFolder

        config = compose_bench(overrides or [], config_file)
        if cfg:
            out.print(config.yaml(), end="", markup=False, soft_wrap=True)
            return
        _refuse_conflicts(list(config.conflicts()))
        folder = ResultFolder(out_dir, force) if out_dir else None
        with loading_bar(err) as progress, build_engine(config, progress) as engine:
            report = config.measurement.run(engine, lambda line: err.print(line, markup=False))
        if folder:
            write_outcome(config, report, folder)
        if as_json:
            print(json.dumps(result_of(config, report)))
            return
        out.print(*config.measurement.tables(report), sep="\n")
        for note in report.notes:
            out.print(note, markup=False)


@app.command()
def inspect(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [OVERRIDES]",
            help="A model folder, or an option of the group model, e.g. qwen3_30b_a3b; behind it "
            "overrides of the groups model and prefill.",
            autocompletion=complete_inspected,
            show_default=False,
        ),
    ] = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show a model's sizes, how its experts are stored, and what pool a GPU's memory affords.

    Reads configs and headers alone, so it comes at once whatever the size.

    * `residency inspect ~/models/Qwen3-30B-A3B`
    * `residency inspect qwen3_30b_a3b model.context=32768 prefill.groups=16`
    """
    with user_errors():
        from residency.conf.commands import compose_inspect
        from residency.conf.listing import inspection_tables
        from residency.runtime.inspection import inspect_model

        config = compose_inspect(model or [], config_file)
        _refuse_conflicts(list(config.faults("model", "prefill")))
        inspection = inspect_model(config.model, config.policies.prefill)
        if as_json:
            print(json.dumps(inspection.as_dict()))
            return
        out.print(*inspection_tables(inspection), sep="\n")


@app.command()
def validate(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Judge all of cache x prefill x decode x device.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compose without loading the model; print every conflict with its reason and its mend.

    Exit status 2 on a conflict, 0 otherwise. decode=gpu means "in the device's slots": it is the
    target for device=cpu too, whose slots are plain memory.

    * `residency validate cache=lru cache.slots=10% decode=hybrid`
    * `residency validate --matrix`
    """
    with user_errors():
        if matrix:
            _show_matrix([*(overrides or []), *(["--config"] if config_file else [])], as_json)
            return
        from residency.conf.commands import compose_with

        found = list(compose_with(overrides or [], config_file).conflicts())
        if as_json:
            print(json.dumps({"valid": not found, "conflicts": [_as_dict(c) for c in found]}))
        elif not found:
            out.print("valid: nothing conflicts")
        else:
            for conflict in found:
                out.print(f"conflict: {conflict}", markup=False, soft_wrap=True)
        if found:
            raise typer.Exit(USAGE_ERROR)


def _refuse_conflicts(conflicts: Sequence[Conflict]) -> None:
    from residency.policies.errors import ConfigError

    *others, last = [str(conflict) for conflict in conflicts] or [""]
    for conflict in others:
        err.print(f"error: {conflict}", markup=False, soft_wrap=True)
    if last:
        raise ConfigError(last)


def _printer(prompt: str) -> Callable[[str], None]:
    """Prints the prompt, once there is something to continue it with, and then each piece."""
    unprinted = [prompt]

    def on_text(piece: str) -> None:
        while unprinted:
            out.print(unprinted.pop(), end="", style="bold", markup=False)
        print(piece, end="", flush=True)

    return on_text


def _show_matrix(overrides: list[str], as_json: bool) -> None:
    from residency.conf.catalog import matrix
    from residency.conf.listing import matrix_table
    from residency.policies.errors import ConfigError

    if overrides:
        raise ConfigError(f"{overrides[0]}: --matrix judges every option at its defaults")
    cells = list(matrix())
    if as_json:
        print(json.dumps([_as_dict(cell) for cell in cells]))
        return
    out.print(matrix_table(cells))


def _as_dict(thing: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(thing)


def main() -> None:
    app()
