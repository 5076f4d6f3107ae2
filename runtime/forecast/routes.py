"""Expected routes: which experts a chunk needs, what a warm pool holds, how often decode hits.

L layers, E experts of each, K of them a token.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Protocol

import torch

from residency.policies.step import IdSpace

MOST_WINDOWS = 16  # of a table's tokens, over which unions are averaged
REPLAYED_TOKENS = 1024  # for a hit rate; the first half only fills the pool


class Routes(Protocol):
    """note: what is assumed, for a report."""

    space: IdSpace
    note: str

    def chances(self, num_tokens: int) -> torch.Tensor:
        """float64 [L, E]: that a chunk of so many tokens needs the expert."""

    def resident(self, num_slots: int) -> torch.Tensor:
        """bool [L, E]: what a pool holds that decode has filled."""

    def hit_rate(self, num_slots: int) -> float:
        """Of decode, one token at a time, in a pool of so many slots in steady state."""


class EvenRoutes:
    """Each set of K experts as likely, whatever came before: the worst case for any cache."""

    note = "routes: every expert as likely"

    def __init__(self, space: IdSpace) -> None:
        self.space = space

    def chances(self, num_tokens: int) -> torch.Tensor:
        space = self.space
        chance = 1 - (1 - space.top_k / space.num_experts) ** num_tokens
        return torch.full((space.num_layers, space.num_experts), chance, dtype=torch.float64)

    def resident(self, num_slots: int) -> torch.Tensor:
        """Alike many of each layer; which ones says nothing."""
        ranks = torch.arange(self.space.num_ids).view(self.space.num_experts, -1).T
        return ranks < num_slots

    def hit_rate(self, num_slots: int) -> float:
        """A layer holds S / L experts on average and fewest when its turn comes: since its last one
        the other layers' misses have taken slots, half of a token's misses over its number of
        layers. With S / L - K (1 - h) / 2 of E experts resident, h solves its own equation. Below
        a token's cycle of L * K slots every expert is evicted before its layer comes again.
        """
        space = self.space
        if num_slots >= space.num_ids:
            return 1.0
        if num_slots < space.num_layers * space.top_k:
            return 0.0
        half = space.top_k / 2
        held = num_slots / space.num_layers - half
        return min(1.0, max(0.0, held / (space.num_experts - half)))


class TableRoutes:
    """As a table of routes has them: recorded, or drawn as unevenly as recorded ones."""

    def __init__(self, space: IdSpace, table_NLK: torch.Tensor, note: str) -> None:
        self.space = space
        self.note = note
        self._table_NLK = table_NLK.long()
        self._chances = lru_cache(self._union)

    def chances(self, num_tokens: int) -> torch.Tensor:
        return self._chances(num_tokens)

    def resident(self, num_slots: int) -> torch.Tensor:
        """The most popular ones."""
        space = self.space
        offset_L1 = torch.arange(space.num_layers)[:, None] * space.num_experts
        ids = (self._table_NLK + offset_L1).flatten()
        order = torch.bincount(ids, minlength=space.num_ids).argsort(descending=True, stable=True)
        held = torch.zeros(space.num_ids, dtype=torch.bool)
        held[order[:num_slots]] = True
        return held.view(space.num_layers, space.num_experts)

    def hit_rate(self, num_slots: int) -> float:
        """LRU's, counted over the table's tokens one by one; policies that keep history hit a
        little more.
        """
        space, pool = self.space, OrderedDict[int, None]()
        tokens = self._table_NLK[:REPLAYED_TOKENS]
        offset_L1 = torch.arange(space.num_layers)[:, None] * space.num_experts
        hits = lookups = 0
        for index, ids in enumerate((tokens + offset_L1).flatten(1).tolist()):
            for expert in ids:
                hit = expert in pool
                if index >= len(tokens) // 2:
                    hits, lookups = hits + hit, lookups + 1
                if hit:
                    pool.move_to_end(expert)
                    continue
                if len(pool) >= num_slots:
                    pool.popitem(last=False)
                pool[expert] = None
        return hits / max(lookups, 1)

    def _union(self, num_tokens: int) -> torch.Tensor:
        """Over windows of consecutive tokens, spread evenly over the table and round its end."""
        length = len(self._table_NLK)
        number = max(1, min(MOST_WINDOWS, 1 << 18 >> num_tokens.bit_length()))
        space = self.space
        seen_LE = torch.zeros(space.num_layers, space.num_experts, dtype=torch.float64)
        for window in range(number):
            begin = window * length // number
            at = (begin + torch.arange(min(num_tokens, length))) % length
            ids_LR = self._table_NLK[at].transpose(0, 1).flatten(1)
            seen_LE += torch.zeros_like(seen_LE).scatter_(1, ids_LR, 1.0)
        return seen_LE / number
