"""`residency report`: a page that says which configuration to use and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from residency.commands.terminal import Json, err, out, user_errors

NAME = "report"  # of the folder that a report is written to unless another is named

Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        help="Sweeps, results, or folders of them.",
        show_default=False,
    ),
]
Against = Annotated[
    Path | None,
    typer.Option("--against", help="Another such folder: a verdict for each row beside it."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Write the report there instead of DIR/report.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace a report in --out.")]


def report(
    folders: Folders,
    against: Against = None,
    out_dir: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make one HTML page of results: which configuration to use, why, and every number's source.

    Beside index.html lie its pictures as PNG, the numbers as data.csv and the text as report.md:
    `residency report runs/sweep`. `--against OTHER` says of each row whether it is faster, slower
    or within noise.
    """
    with user_errors():
        from residency.reports.files import PAGE, ReportFolder
        from residency.reports.reading import read_folders
        from residency.reports.report import report_on
        from residency.reports.summary import as_dict, comparison_text, summary_tables, summary_text

        # Read before the output folder is made: it may lie in one that is not there.
        found = read_folders(folders)
        base = None if against is None else read_folders([against])
        folder = ReportFolder(out_dir or folders[0] / NAME, force)
        with err.status("replaying and drawing"):
            made = report_on(found, base)
            folder.write(made)
        page = folder.path / PAGE
        if as_json:
            print(json.dumps(as_dict(made, folder.path)))
            return
        for line in summary_text(made):
            out.print(line, markup=False, soft_wrap=True)
        for table in summary_tables(made):
            out.print(table)
        for line in comparison_text(made):
            out.print(line, markup=False, soft_wrap=True)
        out.print(f"report: {page}", markup=False, soft_wrap=True)
