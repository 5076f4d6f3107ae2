"""`residency tune`: a policy's keys, searched on one part of a trace and judged on another."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from residency.commands.terminal import Force, Json, Out, err, out, user_errors

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="cache=NAME trace=FILE cache.KEY=VALUES",
        help="The policy, the routes, and values to try for its keys, with commas between them; "
        "also slots, and the parts fit and report.",
        show_default=False,
    ),
]


def tune(words: Words, out_dir: Out = None, force: Force = False, as_json: Json = False) -> None:
    """Search a cache policy's keys by replay on one part of a trace, and report on another.

    Ends with the overrides to use.

    * `residency tune cache=lrfu trace=routes.safetensors cache.decay=0.05,0.1,0.2 slots=25%`
    * `residency tune cache=lfu trace=a.npz cache.half_life=16,64 fit=0%-80% report=80%-100%`
    """
    with user_errors():
        from residency.conf.tuning import ask
        from residency.runtime.replay.curves import Candidate, draw_curves
        from residency.runtime.replay.report import curves_table, tuned_as_dict
        from residency.runtime.replay.tuning import search
        from residency.runtime.results import ResultFolder

        asked = ask(words)
        folder = ResultFolder(out_dir, force) if out_dir else None
        name = asked.file.rpartition("/")[2]
        with err.status("") as status:
            found = search(
                asked.fit, asked.make, asked.start, asked.values, asked.sizes, status.update
            )
            best = found.best
            own = [Candidate("tuned", asked.make(best.choice))]
            own.append(Candidate(f"{asked.cache} by default", asked.make(asked.start)))
            curves = draw_curves(asked.report, own + asked.others, asked.sizes, status.update)
        overrides = asked.overrides(best.choice)
        result = tuned_as_dict(found, curves, (asked.fit, asked.report), name, overrides)
        if folder:
            folder.write(result, asked.yaml)
        if as_json:
            print(json.dumps(result))
            return
        parts = f"{name}, {asked.asked['report'][0]}"
        out.print(curves_table(curves, asked.report, parts))
        for note in curves.notes:
            out.print(note, markup=False)
        tried = f"{len(found.tried)} choices tried on {asked.asked['fit'][0]}"
        out.print(f"{tried}, {best.mean:.2%} hits there against {found.tried[0].mean:.2%}; use")
        out.print(overrides, markup=False, soft_wrap=True)
