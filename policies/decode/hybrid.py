"""hybrid: part of each step's misses is fetched, the host computes the rest at the same time.

The split is chosen layer by layer to end both sides together: of m missing experts, fetch the f
that minimises max(fetch_time(f), host_time(m - f)), both being lines fitted to the times of recent
steps in which both sides ran, for they slow each other down. Fetching all and computing all are
judged by steps in which the other side was idle, so a slow CPU makes this target decode=gpu.

A layer first tries each way (all fetched, all computed, half and half) for `warmup` steps. Later a
way that has not been taken for long is tried again, so rarely that what it is expected to lose
stays a small share of the layer's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from residency.policies.base import Capability, Conflict
from residency.policies.decode.base import Line, Measured, Quotas, SlotTarget

TRIAL_STEPS = 16  # for which quotas are kept, those of a trial as well
TRIAL_SHARE = 0.005  # of a layer's time that trials of each way may cost
LEAST_IDLE = 128  # steps between trials of a way that costs nothing
LEAST_MISSES = 0.5  # per step: with fewer there is nothing to gain
LEAST_SPLIT = 1.5
NO_WAY = -1


class Hybrid(SlotTarget):
    """Splits by the measured rates of link and host."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(SlotTarget.Config):
        """max_fetch: the largest share of a step's misses that is fetched, rounded up.
        max_host: the largest share of a step's misses that the host computes, rounded down.
        warmup: steps for which a layer tries each way before it follows what was measured.
        """

        max_fetch: float = 1.0
        max_host: float = 1.0
        warmup: int = 8

    provides: ClassVar[frozenset[str]] = frozenset({Capability.DECODES_FROM_SLOTS})
    splits: ClassVar[bool] = True

    config: Config

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        fetch, host = self.config.max_fetch, self.config.max_host
        for key, share in (("max_fetch", fetch), ("max_host", host)):
            if not 0 < share <= 1:
                reason = "it is a share of the misses, above 0 and at most 1"
                yield Conflict((f"decode.{key}={share}",), reason, f"decode.{key}=1.0")
        if 0 < fetch and 0 < host and fetch + host < 1:
            keys = (f"decode.max_fetch={fetch}", f"decode.max_host={host}")
            reason = "they leave part of the misses to nobody; their sum must be at least 1"
            yield Conflict(keys, reason, "decode.max_host=1.0")
        if self.config.warmup < 1:
            reason = "without a single step measured there is nothing to follow"
            yield Conflict((f"decode.warmup={self.config.warmup}",), reason, "decode.warmup=8")

    def quotas(self, measured: Measured, most: int) -> Quotas:
        misses = torch.arange(most + 1)
        least = misses - _share(self.config.max_host, misses).floor().long()
        highest = _share(self.config.max_fetch, misses).ceil().long()
        quotas_LM = best_split(measured, least, highest)
        new_L, stale_L = self._new(measured), self._stale(measured, quotas_LM)
        way_L = torch.where(new_L == NO_WAY, stale_L, new_L)
        tried_WM = torch.stack([misses, misses * 0, (misses + 1) // 2]).clamp(least, highest)
        tried_LM = tried_WM[way_L.clamp(min=0)]
        table_LM = torch.where(way_L[:, None] == NO_WAY, quotas_LM, tried_LM)
        return Quotas(table_LM, steps=1 if (new_L != NO_WAY).any() else TRIAL_STEPS)

    def _new(self, measured: Measured) -> torch.Tensor:
        """The way each layer has yet to try, or NO_WAY: int64 [L]."""
        return _first(self._possible(measured) & (measured.steps < self.config.warmup))

    def _stale(self, measured: Measured, quotas_LM: torch.Tensor) -> torch.Tensor:
        """The way each layer should try again, or NO_WAY: int64 [L]."""
        typical_L = measured.misses.round().long().clamp(1, quotas_LM.shape[1] - 1)
        num_layers = len(typical_L)
        chosen_L = quotas_LM.gather(1, typical_L[:, None])[:, 0]
        ways = (typical_L, typical_L * 0, (typical_L + 1) // 2, chosen_L)
        seconds_LW = split_seconds(measured, torch.stack(ways, dim=1), typical_L[:, None])
        chosen_s_L1 = seconds_LW[:, -1:]
        loss_LW = (seconds_LW[:, :-1] - chosen_s_L1).nan_to_num(0, 0, 0)
        apart_L1 = LEAST_IDLE * chosen_s_L1.nan_to_num(0, 0, 0)
        # Layers take their trials one after another rather than all in the same step.
        turn_L = 1 + torch.arange(num_layers) / num_layers
        patience_LW = torch.maximum(loss_LW * (TRIAL_STEPS / TRIAL_SHARE), apart_L1)
        patience_LW = patience_LW * turn_L[:, None]
        return _first(self._possible(measured) & (measured.idle_s > patience_LW))

    def _possible(self, measured: Measured) -> torch.Tensor:
        """Which ways a layer can go under the caps and with so few misses: bool [L, 3]."""
        caps_W = torch.tensor([self.config.max_fetch == 1, self.config.max_host == 1, True])
        least_W = torch.tensor([LEAST_MISSES, LEAST_MISSES, LEAST_SPLIT])
        return caps_W & (measured.misses[:, None] >= least_W)


def split_seconds(measured: Measured, fetched: torch.Tensor, misses: torch.Tensor) -> torch.Tensor:
    """How long `misses` take of which `fetched` are fetched: [L, ...], infinite where unknown.

    Both int64 [L, ...] or broadcastable to it.
    """
    computed = misses - fetched
    fetched_s = measured.fetched_beside.seconds(fetched)
    fetched_s = torch.where(computed == 0, measured.fetched.seconds(fetched), fetched_s)
    computed_s = measured.computed_beside.seconds(computed)
    computed_s = torch.where(fetched == 0, measured.computed.seconds(computed), computed_s)
    computed_s = computed_s.masked_fill(computed == 0, 0)
    return torch.maximum(fetched_s.masked_fill(fetched == 0, 0), computed_s).nan_to_num(torch.inf)


def best_split(measured: Measured, least: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """The number to fetch that ends a step soonest: int64 [L, M], of m = 0, 1, ... missing experts.

    least, highest: int64 [M], the bounds of each number. Of equally good ones the highest is taken,
    since what is fetched stays; all are fetched while nothing is known. Both lines rise with their
    own number, so that the best of a split lies beside the place where they cross.
    """
    misses = torch.arange(len(least))[None]
    met = _crossing(measured.fetched_beside, measured.computed_beside, misses)
    low = torch.minimum(met.nan_to_num(0).clamp(1, len(least)).long(), misses - 1)
    everything = misses.expand_as(low)
    candidates = torch.stack([everything, low + 1, low, torch.zeros_like(low)], dim=-1)
    bounds = (least[:, None], torch.minimum(highest, misses[0])[:, None])
    candidates = candidates.clamp(*bounds)
    seconds = split_seconds(measured, candidates, misses[..., None])
    return candidates.gather(-1, seconds.argmin(-1, keepdim=True))[..., 0]


def _crossing(fetch: Line, host: Line, misses: torch.Tensor) -> torch.Tensor:
    """f with fetch(f) = host(m - f): float64 [L, M]."""
    rise = (fetch.each_s + host.each_s).clamp(min=torch.finfo(torch.float64).tiny)
    return (host.seconds(misses) - fetch.fixed_s[:, None]) / rise[:, None]


def _share(share: float, num: torch.Tensor) -> torch.Tensor:
    """share * num, without the last binary places, which would decide what is rounded."""
    return (share * num.double()).round(decimals=6)


def _first(ways_LW: torch.Tensor) -> torch.Tensor:
    """The first way that is set: int64 [L], NO_WAY where none is."""
    return torch.where(ways_LW.any(1), ways_LW.int().argmax(1), NO_WAY)
