"""Constants from bench results of the same model: what a run measured as its limits is exact."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace
from residency.runtime.forecast.constants import Constants, HostLine

SIDE_BY_SIDE = re.compile(r"an expert: .*?(\d+) us computed")
MICROSECOND = 1e-6


def read_bench(folder: Path) -> dict[str, Any]:
    """A bench's result. Raises ConfigError for a folder without one, or one without limits."""
    file = folder / "result.json" if folder.is_dir() else folder
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        if result["kind"] != "bench" or result["version"] != 1 or not result["limits"]["link"]:
            raise KeyError("kind")
    except OSError as error:
        raise ConfigError(f"--measured {folder}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--measured {folder}: holds no result of `residency bench`; make one with "
            f"`residency bench ... --out {folder}`"
        ) from error
    return result


def bench_constants(
    results: Sequence[tuple[str, dict[str, Any]]], space: IdSpace, row_bytes: int
) -> Constants:
    """results: names, and results of `residency bench` of this model on one machine. The first
    gives link, gather and all-resident times from its `limits`, and a later one that decoded on the
    host what an expert takes there.

    Raises ConfigError for one of another model, and for one without all-resident times.
    """
    for name, result in results:
        check_shape(name, result, space, row_bytes)
    name, first = results[0]
    limits, resident = first["limits"], first["limits"]["resident"]
    if not resident["prefill"]:
        raise ConfigError(
            f"--measured {name}: it has no all-resident times ({resident['reason']}); bench fewer "
            "layers, or leave it out"
        )
    link = limits["link"]["bytes_per_s"]["median"]
    gather = limits["link"]["gather_bytes_per_s"]
    times = sorted((row["tokens"], row["ttft_s"]["median"]) for row in resident["prefill"])
    constants = Constants(
        link_bytes_s=link,
        gather_bytes_s=gather["median"] if gather else link,
        chunk_s=tuple(times),
        step_s=resident["tpot_s"]["median"] if resident["tpot_s"] else None,
        beside=str(first["environment"].get("device", "")).startswith("cuda"),
        exact=True,
        sources=(f"link, gather and all-resident times: limits of {name}",),
    )
    for other, result in results[1:]:
        line = host_line(result, space)
        if line is not None:
            source = f"experts on the host, {line.each_s * 1e6:.0f} us each: {other}"
            constants = constants.with_host(line, source)
    return constants


def check_shape(name: str, result: dict[str, Any], space: IdSpace, row_bytes: int) -> None:
    memory = result["memory"]
    theirs = memory["row_bytes"], memory["bank_bytes"] // memory["row_bytes"]
    ours = row_bytes, space.num_ids
    if theirs != ours:
        raise ConfigError(
            f"--measured {name}: it measured {theirs[1]} experts of {theirs[0]} bytes, and this "
            f"model has {ours[1]} of {ours[0]}; bench this model"
        )


def host_line(result: dict[str, Any], space: IdSpace) -> HostLine | None:
    """What an expert takes on the host, from a run that decoded there; None from any other.

    A run that computed every expert on the host: what its step took beyond the all-hit one, over
    all its experts. One that split them: the side-by-side time that it noted.
    """
    decode, resident = result["decode"], result["limits"]["resident"]["tpot_s"]
    totals = [run["totals"] for run in decode["runs"]]
    computed = sum(run["computed"] for run in totals)
    lookups = sum(run["lookups"] for run in totals)
    if not computed:
        return None
    if computed == lookups and resident is not None:
        per_token = lookups / len(totals) / decode["tokens"]
        spent = decode["tpot_s"]["median"] - resident["median"]
        return HostLine(0.0, max(spent, 0.0) / per_token)
    found = (SIDE_BY_SIDE.search(note) for note in result["notes"])
    match = next((one for one in found if one), None)
    return None if match is None else HostLine(0.0, int(match[1]) * MICROSECOND)
