"""Decode foretold: the all-hit step, and layer by layer the wait for what is missing.

Of a layer's lookups each misses with the same chance, so misses are binomial. The target itself
says how many of m misses it fetches, once it knows the rates; the host computes the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch

from residency.policies.decode import DecodeTarget, Line, Measured
from residency.policies.step import IdSpace
from residency.runtime.forecast.constants import Constants, HostLine

KNOWN = 1 << 20  # steps that went each way: nothing is tried out any more


@dataclass(frozen=True)
class Step:
    """A decode step foretold. Per layer: experts fetched and computed, on average."""

    seconds: float
    hit_rate: float
    fetched: float
    computed: float


class Unknown(Exception):
    """What has to be measured before this can be foretold."""


def decode_step(
    target: DecodeTarget,
    space: IdSpace,
    row_bytes: int,
    constants: Constants,
    hit_rate: float,
    lookups: int | None = None,
) -> Step:
    """lookups: distinct experts of a layer's step, K where one sequence is decoded.

    Raises Unknown where a constant is missing.
    """
    if constants.step_s is None:
        raise Unknown("the time of a step that hits always was not measured")
    if target.computes_on_host(space.num_layers) and constants.host is None:
        raise Unknown("the rate of experts on the host was not measured")
    number = space.top_k if lookups is None else lookups
    fetch = HostLine(0.0, row_bytes / constants.gather_bytes_s)
    rate_beside = constants.gather_beside_bytes_s or constants.gather_bytes_s
    fetch_beside = HostLine(0.0, row_bytes / rate_beside)
    host = constants.host or HostLine(0.0, 0.0)
    host_beside = constants.host_beside or host
    placed = target.host_layers(space.num_layers)
    table = _quotas(target, space, number, (fetch, host, fetch_beside, host_beside), hit_rate)
    seconds, fetched, computed = constants.step_s, 0.0, 0.0
    for layer in range(space.num_layers):
        on_host = layer in placed
        for misses, chance in enumerate(_binomial(number, 0.0 if on_host else hit_rate)):
            quota = 0 if on_host else int(table[layer, misses])
            rest = misses - quota
            lines = (fetch_beside, host_beside) if quota and rest else (fetch, host)
            seconds += chance * max(_of(lines[0], quota), _of(lines[1], rest))
            fetched += chance * quota
            computed += chance * rest
    return Step(seconds, hit_rate, fetched / space.num_layers, computed / space.num_layers)


def _quotas(
    target: DecodeTarget,
    space: IdSpace,
    most: int,
    lines: tuple[HostLine, HostLine, HostLine, HostLine],
    hit_rate: float,
) -> torch.Tensor:
    """int [L, most + 1], as the target decides where everything is measured."""
    num_layers = space.num_layers

    def spread(line: HostLine) -> Line:
        return Line(*(torch.full((num_layers,), v).double() for v in (line.fixed_s, line.each_s)))

    measured = Measured(
        fetched=spread(lines[0]),
        computed=spread(lines[1]),
        fetched_beside=spread(lines[2]),
        computed_beside=spread(lines[3]),
        misses=torch.full((num_layers,), most * (1 - hit_rate)).double(),
        steps=torch.full((num_layers, 3), KNOWN),
        idle_s=torch.zeros(num_layers, 3, dtype=torch.float64),
    )
    return target.quotas(measured, most).table_LM


def _of(line: HostLine, number: int) -> float:
    return line.fixed_s + number * line.each_s if number else 0.0


def _binomial(number: int, hit_rate: float) -> list[float]:
    """The chance of each number of misses, 0 to `number`."""
    miss = 1 - hit_rate
    return [comb(number, m) * miss**m * hit_rate ** (number - m) for m in range(number + 1)]
