"""Tables of routes: even, skewed as real routers are, or recorded.

N tokens, L layers, K experts per token, E experts in a layer. Made-up tables are drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace
from residency.runtime.popularity import popularity
from residency.runtime.routing import TableRouting, adjacent_overlap
from residency.runtime.traces import read_trace

NUM_TOKENS = 1 << 14  # a power of two, so that a clock shifted back by one goes on in step
NUM_CHAINS = 64  # stretches of tokens that remember one another, each of 256
REUSE = 0.423  # adjacent-token reuse of a recorded decode trace, gpt-oss-20b (tests/data)
FIT_SAMPLES = 1 << 20
MODEL, EVEN, SKEWED, TRACE = "model", "even", "skewed", "trace:"


@dataclass(frozen=True)
class RouteTable:
    """int16 [N, L, K] on the CPU. note: what a report says of it."""

    table_NLK: torch.Tensor
    note: str

    def on(self, device: torch.device) -> TableRouting:
        return TableRouting(self.table_NLK.to(device))


def check_routing(name: str, space: IdSpace) -> None:
    """Raises ConfigError where `routes_of` would, without drawing a table."""
    if name not in (EVEN, SKEWED):
        routes_of(name, space, seed=0)


def routes_of(name: str, space: IdSpace, seed: int) -> RouteTable | None:
    """The table that `model.routing` names, None for the model's own routers.

    Raises ConfigError, in one line, for a name that is none, and for a trace that cannot be read or
    does not fit the model.
    """
    if name.startswith(TRACE):
        file = name.removeprefix(TRACE)
        return RouteTable(read_trace(file, space), f"routing: recorded in {file}")
    builders: dict[str, Callable[[IdSpace, int], RouteTable | None]] = {
        MODEL: lambda space, seed: None,
        EVEN: even,
        SKEWED: skewed,
    }
    if name not in builders:
        raise ConfigError(f"model.routing={name}: it must be model, even, skewed or trace:FILE")
    return builders[name](space, seed)


def even(space: IdSpace, seed: int, num_tokens: int = NUM_TOKENS) -> RouteTable:
    """Every set of K experts equally likely for each token and layer: Floyd's sampling."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, top_k = space.num_experts, space.top_k
    chosen_RK = torch.empty(num_tokens * space.num_layers, top_k, dtype=torch.int16)
    for i in range(top_k):
        last = num_experts - top_k + i
        draw_R = torch.randint(0, last + 1, (len(chosen_RK),), generator=generator).short()
        repeated_R = (chosen_RK[:, :i] == draw_R[:, None]).any(dim=1)
        chosen_RK[:, i] = torch.where(repeated_R, last, draw_R)
    return RouteTable(chosen_RK.view(num_tokens, space.num_layers, top_k), "routing: even")


def skewed(space: IdSpace, seed: int, num_tokens: int = NUM_TOKENS) -> RouteTable:
    """Unevenly popular experts, each kept from token to token with one chance, fitted to REUSE."""
    generator = torch.Generator().manual_seed(seed)
    fresh_NLK = draw_distinct(popularity(space, generator), num_tokens, space.top_k, generator)
    fresh_CNLK = fresh_NLK.unflatten(0, (NUM_CHAINS, -1))
    luck_CNLK = torch.rand(fresh_CNLK.shape, generator=generator)
    chance = _fit(fresh_CNLK, luck_CNLK)
    table_CNLK = _chains(fresh_CNLK, luck_CNLK, chance)
    note = (
        f"routing: skewed (an expert is kept from one token to the next with chance {chance:.3f}; "
        f"adjacent tokens share {_reuse(table_CNLK):.3f} of their experts)"
    )
    return RouteTable(table_CNLK.flatten(0, 1), note)


def draw_distinct(
    shares_LE: torch.Tensor, num_tokens: int, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """int16 [N, L, K]: K experts one after another, each by its share among those not yet drawn."""
    num_layers, num_experts = shares_LE.shape
    if 2 * top_k > num_experts:  # a race of exponentials: the same law, without repeats
        times = torch.empty(num_tokens, num_layers, num_experts).exponential_(generator=generator)
        return (times / shares_LE).argsort(dim=2)[..., :top_k].short()
    layer_L = torch.arange(num_layers)
    edges = (shares_LE.cumsum(dim=1) + layer_L[:, None]).flatten()  # layer l spans (l, l + 1]
    layer_R = layer_L.repeat(num_tokens)
    chosen_RK = torch.full((len(layer_R), top_k), -1, dtype=torch.int16)
    for i in range(top_k):
        rows = torch.arange(len(layer_R))
        while len(rows):
            place = torch.rand(len(rows), generator=generator, dtype=torch.float64) + layer_R[rows]
            draw = torch.searchsorted(edges, place) - layer_R[rows] * num_experts
            draw = draw.clamp_(0, num_experts - 1).short()
            rows_before = chosen_RK[rows, :i]
            chosen_RK[rows, i] = draw
            rows = rows[(rows_before == draw[:, None]).any(dim=1)]
    return chosen_RK.view(num_tokens, num_layers, top_k)


def _chains(fresh_CNLK: torch.Tensor, luck_CNLK: torch.Tensor, chance: float) -> torch.Tensor:
    """Each token keeps an expert of the one before with `chance` and fills up from `fresh`.

    Fresh experts come in the order drawn, without those kept; K of them always suffice.
    """
    out_CNLK = fresh_CNLK.clone()
    for i in range(1, fresh_CNLK.shape[1]):
        before_CLK, fresh_CLK = out_CNLK[:, i - 1], fresh_CNLK[:, i]
        kept_CLK = luck_CNLK[:, i] < chance
        held_CLK = torch.where(kept_CLK, before_CLK, -1)
        taken_CLK = (fresh_CLK[..., :, None] == held_CLK[..., None, :]).any(-1)
        queue_CLK = fresh_CLK.gather(-1, taken_CLK.byte().argsort(dim=-1, stable=True))
        place_CLK = ((~kept_CLK).cumsum(-1) - 1).clamp_(min=0)
        out_CNLK[:, i] = torch.where(kept_CLK, before_CLK, queue_CLK.gather(-1, place_CLK))
    return out_CNLK


def _fit(fresh_CNLK: torch.Tensor, luck_CNLK: torch.Tensor) -> float:
    """The chance under which adjacent tokens share REUSE of their experts, by regula falsi.

    0 where popularity alone makes them share more.
    """
    per_token = fresh_CNLK[:, 0].numel()
    length = min(fresh_CNLK.shape[1], max(16, FIT_SAMPLES // per_token))
    fresh, luck = fresh_CNLK[:, :length], luck_CNLK[:, :length]
    low, high = (0.0, _reuse(fresh)), (1.0, 1.0)
    if low[1] >= REUSE:
        return 0.0
    for _ in range(4):
        chance = low[0] + (REUSE - low[1]) * (high[0] - low[0]) / (high[1] - low[1])
        reuse = _reuse(_chains(fresh, luck, chance))
        low, high = ((chance, reuse), high) if reuse < REUSE else (low, (chance, reuse))
    return chance


def _reuse(table_CNLK: torch.Tensor) -> float:
    return adjacent_overlap(table_CNLK[:, :-1], table_CNLK[:, 1:])
