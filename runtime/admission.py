"""Admission: look a step's experts up, choose victims by the policy's keys, list the copies.

The readable definition, in fixed-shape tensor operations without a host synchronisation; the
fused kernel must equal it. All policies share it: a policy supplies the keys and may decline.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from residency.policies.step import IdSpace

EMPTY, EVICTABLE, PROTECTED = 0, 1, 2


class Admission(NamedTuple):
    """What one step found and what must be copied. N is at most the number of ids given.

    unique: int64 [N] the step's distinct global ids, ascending, padded with the sink id.
    rows: int64 [N] the row each is read from: a slot, num_slots + j for the j-th bypassed, or -1
        for one that is left to the host.
    fetched: bool [N] whether that row must first be filled from the bank.
    on_host: bool [N] the missing ones beyond the quota, which the host computes.
    counts: int64 [5] lookups, hits, misses, evictions, and how many of the misses are on_host.
    entered: int64 [N] those that were given a slot, the sink id elsewhere.
    evicted: int64 [N] whom each of them displaced, the sink id where nobody was.
    """

    unique: torch.Tensor
    rows: torch.Tensor
    fetched: torch.Tensor
    on_host: torch.Tensor
    counts: torch.Tensor
    entered: torch.Tensor
    evicted: torch.Tensor


class Rows(NamedTuple):
    """Experts (ids within the layer) and the rows they are read from, pairwise."""

    experts: list[int]
    rows: list[int]

    def part(self, start: int, end: int) -> Rows:
        return Rows(self.experts[start:end], self.rows[start:end])


class Placed(NamedTuple):
    """An admission read back to the host: what is in place, what must be copied, and the experts
    that the host computes.
    """

    hits: Rows
    misses: Rows
    on_host: list[int]

    @classmethod
    def of(cls, admission: Admission, layer: int, space: IdSpace) -> Placed:
        unique, rows, fetched, on_host = (tensor.cpu().numpy() for tensor in admission[:4])
        experts = unique - layer * space.num_experts
        hit = ~(fetched | on_host) & (unique != space.sink)
        hits, misses = (Rows(experts[m].tolist(), rows[m].tolist()) for m in (hit, fetched))
        return cls(hits, misses, experts[on_host].tolist())


def distinct(experts: torch.Tensor, layer: int, space: IdSpace) -> torch.Tensor:
    """Distinct global ids, ascending, padded with the sink id: int64 [min(N, E)].

    experts: int [N] ids within the layer, repeats allowed; num_experts stands for none.
    """
    wanted = torch.zeros(space.num_experts + 1, dtype=torch.bool, device=experts.device)
    wanted.index_fill_(0, experts.flatten().long(), True)
    wanted = wanted[: space.num_experts]
    ids = torch.arange(space.num_experts, device=experts.device) + layer * space.num_experts
    unique = torch.where(wanted, ids, space.sink).sort().values
    return unique[: min(experts.numel(), space.num_experts)]


def admit(
    unique: torch.Tensor,
    slot_of: torch.Tensor,
    id_of: torch.Tensor,
    keys: torch.Tensor,
    admitted: torch.Tensor | None,
    quota: torch.Tensor | None = None,
    slots: range | None = None,
) -> Admission:
    """Admit the missing ids of one step and update both maps in place.

    unique: int64 [N] as `distinct` gives it. slot_of: int32 [num_ids + 1], -1 where absent.
    id_of: int32 [num_slots], the sink id where empty. keys: int64 [num_ids + 1], as they were
    before this step's touch. admitted: bool [N], or None for all. quota: int [M + 1], of m missing
    ids quota[m] are fetched; None for all. slots: those that may be given, None for all.

    Empty slots are filled first, by index; then the residents with the lowest (key, id) go, never
    one that this step needs. Missing ids, ascending, take the freed slots in that order. Where a
    quota falls short, those are fetched that are admitted and have the highest (key, id).
    Precondition: the step's admitted and resident ids together are at most the slots that may be
    given, and its residents lie in such.
    """
    sink, num_slots = len(slot_of) - 1, len(id_of)
    real = unique != sink
    found = slot_of[unique].long()
    hit = real & (found >= 0)
    missing = real & ~hit
    welcome = torch.ones_like(missing) if admitted is None else admitted
    fetched = missing
    if quota is not None:
        fetched = within_quota(missing, welcome, keys[unique], quota)
    on_host = missing & ~fetched
    entering = fetched & welcome
    bypassed = fetched & ~entering
    rows = torch.where(hit, found, num_slots + bypassed.cumsum(0) - 1)
    rows = torch.where(on_host, -1, rows)
    entered = torch.where(entering, unique, sink)
    evicted = torch.full_like(unique, sink)
    slots = range(num_slots) if slots is None else slots
    if slots:
        held = id_of[slots.start : slots.stop]
        order = eviction_order(unique, hit, held, keys)
        entering_rank = (entering.cumsum(0) - 1).clamp_(min=0, max=len(order) - 1)
        target = order[entering_rank]
        evicted = torch.where(entering, held[target].long(), sink)
        _assign(held, target, unique, entering)
        target = target + slots.start
        rows = torch.where(entering, target, rows)
        slot_of.index_fill_(0, evicted, -1)
        slot_of[entered] = target.int()
        slot_of[sink:].fill_(-1)
    sums = real.sum(), hit.sum(), missing.sum(), (evicted != sink).sum(), on_host.sum()
    return Admission(unique, rows, fetched, on_host, torch.stack(sums), entered, evicted)


def within_quota(
    missing: torch.Tensor, welcome: torch.Tensor, keys: torch.Tensor, quota: torch.Tensor
) -> torch.Tensor:
    """Which missing ids are fetched: bool [N], all arguments but `quota` in ascending id order."""
    order = keys.argsort(stable=True)
    order = order[welcome[order].to(torch.uint8).argsort(stable=True)]
    rank = torch.empty_like(order)
    above = missing[order].flip(0).cumsum(0).flip(0)  # missing ids of this rank or a higher one
    rank[order] = above
    return missing & (rank <= quota.index_select(0, missing.sum().reshape(1)))


def eviction_order(
    unique: torch.Tensor, hit: torch.Tensor, id_of: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """id_of's slots, first to be taken first: empty by index, evictable by (key, id), protected."""
    ids, sink = id_of.long(), len(keys) - 1
    protected = torch.zeros_like(keys, dtype=torch.bool)
    protected.index_fill_(0, torch.where(hit, unique, sink), True)
    rank = torch.where(protected[ids], PROTECTED, EVICTABLE)
    rank = torch.where(ids == sink, EMPTY, rank)
    order = ids.argsort(stable=True)
    order = order[keys[ids[order]].argsort(stable=True)]
    return order[rank[order].argsort(stable=True)]


def _assign(
    id_of: torch.Tensor, target: torch.Tensor, unique: torch.Tensor, entering: torch.Tensor
) -> None:
    """id_of[target] = unique where entering, in fixed shape: others go to a spare entry."""
    spare = torch.cat([id_of, id_of.new_zeros(1)])
    spare[torch.where(entering, target, len(id_of))] = unique.int()
    id_of.copy_(spare[:-1])


class Copies(NamedTuple):
    """The copies of an admission in the form that the gather kernel reads, compact from the front.

    experts: int32 [N] within the layer; rows: int32 [N]; number: int32 [1].
    """

    experts: torch.Tensor
    rows: torch.Tensor
    number: torch.Tensor


def copy_list(admission: Admission, layer: int, space: IdSpace) -> Copies:
    """What must be copied, in fixed shapes and without a host synchronisation."""
    order = (~admission.fetched).to(torch.uint8).argsort(stable=True)
    experts = admission.unique[order] - layer * space.num_experts
    number = admission.fetched.sum(dtype=torch.int32).reshape(1)
    return Copies(experts.int(), admission.rows[order].int(), number)
