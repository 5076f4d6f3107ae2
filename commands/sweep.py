"""`residency sweep`: many combinations, each with a result of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residency.commands.terminal import INTERRUPTED, Json, err, out, user_errors

if TYPE_CHECKING:
    from residency.sweeps.sweep import Sweep

JOBS_FAILED = 1

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="As for bench, with several values of a key: cache=lru,lrfu "
        "prefill.max_tokens=range(64,257,64) 'cache=glob(l*)'; and hydra/launcher=NAME.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--out", help="Write there; else into multirun/DATE/TIME."),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Go on with the sweep in this folder.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Run nothing if a combination cannot work.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")]
Routes = Annotated[
    bool,
    typer.Option("--no-routes", help="Do not record routes, which reports draw bounds from."),
]


def sweep(
    overrides: Words = None,
    out_dir: Folder = None,
    resume: Resume = None,
    strict: Strict = False,
    dry_run: DryRun = False,
    no_routes: Routes = False,
    as_json: Json = False,
) -> None:
    """Run every combination of several values, by `bench` unless workload=... says otherwise.

    `residency sweep cache=lru,lrfu prefill=demand,always_stream cache.slots=25%,50%`. What cannot
    work is listed with its reason and skipped. Each job has a folder with result.json; `--resume
    DIR` runs what is missing there. Exit status 1 if a job failed.
    """
    with user_errors():
        from residency.sweeps import listing

        planned = _planned(overrides or [], out_dir, resume, strict, no_routes)
        if not planned.resumed:
            for line in listing.skipped_lines(planned):
                err.print(line, markup=False, soft_wrap=True)
        _check(planned, strict)
        if dry_run:
            _show(planned, as_json)
            return
        try:
            _run(planned)
        except KeyboardInterrupt:
            _say_interrupted(planned)
            raise typer.Exit(INTERRUPTED) from None
        _end(planned, as_json)


def _planned(
    overrides: list[str], out_dir: Path | None, resume: Path | None, strict: bool, no_routes: bool
) -> Sweep:
    from residency.policies.errors import ConfigError
    from residency.sweeps.sweep import Sweep

    if resume is None:
        with err.status("composing") as status:
            return Sweep.planned(
                overrides,
                out_dir,
                routes=not no_routes,
                told=lambda done, total: status.update(f"composing {done} of {total}"),
            )
    beside = {"--out": out_dir is not None, "--strict": strict, "--no-routes": no_routes}
    for option, given in beside.items():
        if given:
            raise ConfigError(f"{option}: the sweep in {resume} was planned already; leave it out")
    return Sweep.found(resume, overrides)


def _check(sweep: Sweep, strict: bool) -> None:
    from residency.policies.errors import ConfigError

    skipped = len(sweep.manifest.skipped)
    if strict and skipped:
        raise ConfigError(f"--strict: {skipped} combinations cannot work; nothing was run")
    if not sweep.manifest.jobs:
        raise ConfigError("no combination can work; nothing was run")


def _show(sweep: Sweep, as_json: bool) -> None:
    from residency.sweeps import listing

    if as_json:
        print(json.dumps(listing.as_dict(sweep)))
        return
    for line in (*listing.job_lines(sweep), *listing.duplicate_lines(sweep)):
        out.print(line, markup=False, soft_wrap=True)


def _run(sweep: Sweep) -> None:
    from residency.sweeps.launching import LaunchError

    try:
        sweep.run(err)
    except LaunchError as error:  # what it did not run is counted below
        err.print(f"error: {error}", markup=False, soft_wrap=True)


def _end(sweep: Sweep, as_json: bool) -> None:
    """What became of the jobs, and the exit status that says it too."""
    from residency.sweeps import listing
    from residency.sweeps.jobs import State

    if as_json:
        print(json.dumps(listing.as_dict(sweep)))
    else:
        out.print(listing.jobs_table(sweep))
        out.print(f"residency report {sweep.folder} draws it", markup=False, soft_wrap=True)
    bad = [job for job in sweep.manifest.jobs if sweep.job_folder(job).state is not State.DONE]
    if bad:
        first = sweep.folder / bad[0].folder
        err.print(
            f"{len(bad)} of {len(sweep.manifest.jobs)} jobs failed, the first in {first}; "
            f"residency sweep --resume {sweep.folder} runs them again",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(JOBS_FAILED)


def _say_interrupted(sweep: Sweep) -> None:
    from residency.sweeps.jobs import State

    done = list(sweep.states().values()).count(State.DONE)
    err.print(
        f"\ninterrupted: {done} of {len(sweep.manifest.jobs)} jobs are done; "
        f"residency sweep --resume {sweep.folder} runs the others",
        markup=False,
        soft_wrap=True,
    )
