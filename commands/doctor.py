"""`residency doctor`: measures the machine once, and says what will hold the user back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from residency.commands.terminal import Force, Json, err, out, user_errors

Device = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[device=...]",
        help="Which device to measure, e.g. device=cpu or device=cuda device.index=1",
        show_default=False,
    ),
]


def doctor(
    overrides: Device = None,
    as_json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller sizes, fewer repeats: rougher numbers.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the profile there as well.")
    ] = None,
    force: Force = False,
) -> None:
    """Measure the machine once, keep its profile, and name what will hold you back.

    Copies pinned and pageable, the gather, both beside a busy CPU, copies on the device, matrix
    products, experts on the host, pinning, graph capture. `residency plan`, prefill=auto and
    decode=hybrid use the profile.
    """
    with user_errors():
        from residency.conf.examining import compose_device, keep
        from residency.policies.errors import OutputError
        from residency.runtime.machine.findings import findings
        from residency.runtime.machine.measurement import Measurement
        from residency.runtime.machine.probes import examine
        from residency.runtime.machine.tables import line, machine_table
        from residency.runtime.results import require_writable

        device = compose_device(overrides or [])
        if file is not None:
            require_writable(file, "--out")
            if file.exists() and not force:
                raise OutputError(f"--out {file}: is there already; name another, or add --force")

        def told(found: Measurement | str) -> None:
            if not as_json:
                err.print(found if isinstance(found, str) else line(found), markup=False)

        profile = examine(device.open(), told, quick=quick)
        kept, files = findings(profile), keep(profile, file)
        if as_json:
            found = [finding.as_dict() for finding in kept]
            print(json.dumps(profile.as_dict() | {"findings": found, "files": files}))
            return
        out.print(machine_table(profile))
        for name, reason in profile.failures.items():
            out.print(f"{name}: not measured: {reason}", markup=False, soft_wrap=True)
        out.print("What will hold you back:" if kept else "Nothing found that would hold you back.")
        for finding in kept:
            out.print(f"- {finding}", markup=False, soft_wrap=True)
        for written in files:
            out.print(f"profile: {written}", markup=False, soft_wrap=True)
