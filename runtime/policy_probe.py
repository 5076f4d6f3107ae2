"""A probe: one step of each phase on tensors without values, before a policy is run.

What needs a value on the host fails there on every machine, not only within a CUDA graph.
"""

from __future__ import annotations

import copy

import torch

from residency.policies.cache import CachePolicy
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool


def probe(policy: CachePolicy, space: IdSpace) -> None:
    """Raises PolicyError for a policy that breaks its contract there; `policy` stays as it is."""
    device = torch.device("meta")
    pool = SlotPool(space, space.top_k, copy.copy(policy), device)
    token = torch.empty((), dtype=torch.int64, device=device)
    ids = torch.empty(space.top_k, dtype=torch.int64, device=device)
    for phase in Phase:
        step = Step(token, space.num_layers - 1, phase)
        pool.refresh(step)
        pool.welcomes(ids, step)
        pool.moved(ids, ids)
        pool.touch(ids, step)
