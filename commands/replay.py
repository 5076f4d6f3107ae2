"""`residency replay`: a trace under other policies and pool sizes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from residency.commands.terminal import Force, Json, Out, err, out, user_errors

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="trace=FILE [KEY=VALUES]",
        help="Of the keys trace, cache, slots and the policies' own; values have commas between "
        "them, and each is a curve.",
        show_default=False,
    ),
]


def replay(words: Words, out_dir: Out = None, force: Force = False, as_json: Json = False) -> None:
    """Replay recorded routes: miss ratios of policies over pool sizes, beside Belady's bound.

    `residency trace record` writes routes. `--out` also gets curves.png.

    * `residency replay trace=routes.safetensors slots=25%,50%`
    * `residency replay trace=routes.safetensors cache=lru,lrfu cache.decay=0.1,0.5 slots=192,all`
    """
    with user_errors():
        from residency.conf.replaying import ask
        from residency.runtime.replay.chart import CHART_NAME, chart_png
        from residency.runtime.replay.curves import draw_curves
        from residency.runtime.replay.report import as_dict, curves_table, title
        from residency.runtime.results import ResultFolder

        question = ask(words)
        folder = ResultFolder(out_dir, force) if out_dir else None
        trace, name = question.trace, question.file.rpartition("/")[2]
        with err.status("") as status:
            curves = draw_curves(trace, question.candidates, question.sizes, status.update)
        result = as_dict(curves, trace, name)
        if folder:
            picture = chart_png(curves, title(trace, name))
            folder.write(result, question.yaml, {CHART_NAME: picture})
        if as_json:
            print(json.dumps(result))
            return
        out.print(curves_table(curves, trace, name))
        for note in curves.notes:
            out.print(note, markup=False)
