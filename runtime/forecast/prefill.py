"""Prefill foretold: the mode itself plans chunks that are expected, and its plans are added up.

A layer takes max(gap, early copies) + late copies, where the gap is its share of the all-resident
time, early copies start before its router has spoken and late ones wait for it. So a mode that
always waits takes link + compute, one that never does max(link, compute) and its first group: the
floors that `residency bench` judges by. Where copies do not run beside the compute all is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from residency.policies.prefill import Ahead, Costs, LayerView, PrefillMode
from residency.policies.step import IdSpace
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.routes import Routes
from residency.runtime.prefill_plans import plan_ahead, plan_rest

GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Shape:
    """Of the experts, the slots and the staging. row_bytes: of one expert."""

    space: IdSpace
    row_bytes: int
    num_slots: int
    group_size: int


@dataclass(frozen=True)
class Prompt:
    """A prompt foretold. waits: whether every layer waits for its router. ways: how many layers
    go which way, for a mode that chooses.
    """

    num_tokens: int
    seconds: float
    link_bytes: float
    compute_s: float
    waits: bool
    ways: dict[str, int]


class PrefillForecast:
    """Of one mode with one model on one machine."""

    def __init__(
        self,
        mode: PrefillMode,
        routes: Routes,
        shape: Shape,
        constants: Constants,
        *,
        welcome: bool = True,
    ) -> None:
        """welcome: whether experts of a prompt may enter the slots at all."""
        self._mode = mode
        self._routes = routes
        self._shape = shape
        self._constants = constants
        self._welcome = welcome and shape.num_slots > 0

    def prompt(self, num_tokens: int, resident: torch.Tensor | None = None) -> Prompt:
        """resident: bool [L, E], what lies in slots before it; None for nothing.

        Raises PolicyError for a mode whose plans break the rules.
        """
        space = self._shape.space
        held = torch.zeros(space.num_layers, space.num_experts, dtype=torch.bool)
        held = held if resident is None else resident.clone()
        chunks, rest = [], num_tokens
        while rest > 0:
            chunks.append(self._chunk(min(rest, self._mode.config.chunk_tokens), held))
            rest -= self._mode.config.chunk_tokens
        ways: dict[str, int] = {}
        for chunk in chunks:
            for way, number in chunk.ways.items():
                ways[way] = ways.get(way, 0) + number
        return Prompt(
            num_tokens,
            sum(chunk.seconds for chunk in chunks),
            sum(chunk.link_bytes for chunk in chunks),
            sum(chunk.compute_s for chunk in chunks),
            all(chunk.waits for chunk in chunks),
            ways,
        )

    def _chunk(self, num_tokens: int, held_LE: torch.Tensor) -> Prompt:
        """Changes `held_LE` to what lies in slots afterwards."""
        shape, constants = self._shape, self._constants
        chances_LE = self._routes.chances(num_tokens)
        compute_s = constants.compute_s(num_tokens)
        expert_s = shape.row_bytes / constants.link_bytes_s
        gap_s = compute_s / shape.space.num_layers
        costs = Costs(expert_s, gap_s if constants.beside else 0.0)
        fresh_LE = torch.zeros_like(held_LE)
        seconds = moved = 0.0
        waits, ways = True, dict[str, int]()
        for layer, chances in enumerate(chances_LE):
            view = LayerView(
                layer=layer,
                num_tokens=num_tokens,
                resident=held_LE[layer].clone(),
                welcome=torch.full((shape.space.num_experts,), self._welcome),
                chances=chances,
                cycle=float(chances_LE.sum()),
                num_sharing=shape.space.num_layers - layer,
                num_slots=shape.num_slots,
                num_empty=max(0, shape.num_slots - int(held_LE.sum())),
                costs=costs,
            )
            ahead = plan_ahead(self._mode, view)
            late = self._rest(ahead, view, held_LE, fresh_LE, chances_LE) if ahead.waits else 0
            early = int(ahead.plan.stream.sum())
            early_s = early * expert_s + self._copies_s(int(ahead.plan.copy.sum()))
            seconds += max(gap_s, early_s) if constants.beside else gap_s + early_s
            seconds += late * expert_s
            moved += (early + late) * shape.row_bytes
            if not ahead.waits and layer == 0 and constants.beside:
                seconds += min(shape.group_size, early) * expert_s
            waits = waits and ahead.waits and not early
            if ahead.choice is not None:
                ways[ahead.choice.name] = ways.get(ahead.choice.name, 0) + 1
        return Prompt(num_tokens, seconds, moved, compute_s, waits, ways)

    def _rest(
        self,
        ahead: Ahead,
        view: LayerView,
        held_LE: torch.Tensor,
        fresh_LE: torch.Tensor,
        chances_LE: torch.Tensor,
    ) -> int:
        """Experts that cross the link when the router has spoken; admits them."""
        assert view.chances is not None, "chances are foretold"
        routed = drawn(view.chances, view.layer)
        view = replace(view, routed=routed, landed=ahead.plan.stream)
        plan = plan_rest(self._mode, view, ahead)
        fresh_LE[view.layer] = held_LE[view.layer] & routed | plan.admit
        held_LE[view.layer] |= plan.admit
        self._evict(held_LE, fresh_LE, chances_LE)
        return int(((plan.stream | plan.admit) & ~ahead.plan.stream).sum())

    def _evict(
        self, held_LE: torch.Tensor, fresh_LE: torch.Tensor, chances_LE: torch.Tensor
    ) -> None:
        """Down to the slots there are: those least likely to be needed, alike many of each layer,
        before the chunk's own, of which the first layers' go first.
        """
        if (excess := int(held_LE.sum()) - self._shape.num_slots) <= 0:
            return
        layer_L1 = torch.arange(len(held_LE))[:, None]
        worth_LE = torch.where(fresh_LE, 2.0 + layer_L1, chances_LE).masked_fill(
            ~held_LE, torch.inf
        )
        gone = worth_LE.T.flatten().argsort(stable=True)[:excess]
        held_LE[gone % len(held_LE), gone // len(held_LE)] = False

    def _copies_s(self, num: int) -> float:
        """Copies within the device; no time where their rate is not known, since it is far above
        the link's.
        """
        rate = self._constants.device_copy_bytes_s
        return 0.0 if rate is None else num * self._shape.row_bytes / rate


def drawn(chances: torch.Tensor, turn: int) -> torch.Tensor:
    """bool [E]: systematic sampling. Each is drawn with its own chance, and so many as are expected
    up to one; `turn` shifts who.
    """
    ends = chances.cumsum(0) + (turn * GOLDEN) % 1.0
    begins = torch.cat([ends.new_tensor([(turn * GOLDEN) % 1.0]), ends[:-1]])
    return (ends + 1e-9).floor() > (begins + 1e-9).floor()
