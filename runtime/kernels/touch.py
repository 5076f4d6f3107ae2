"""Fused touches of built-in cache policies: one launch for what their tensor form does in many.

Each equals the policy's `touch` bit for bit, in either phase. A policy without an entry here runs
its tensor form, captured or not.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from residency.policies.cache import CachePolicy
from residency.policies.cache.lrfu import DECAY_BITS, STEP_BITS, TOKEN_BITS, Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.cache.succession import Succession
from residency.policies.step import Step
from residency.runtime.kernels.succession import launch_succession, new_arrivals

Touch = Callable[[Tensor, Step], None]


@triton.jit(do_not_specialize=["num", "layer"])
def _lru_kernel(
    unique_ptr: tl.tensor, keys_ptr: tl.tensor, token_ptr: tl.tensor, num: tl.tensor,
    layer: tl.tensor, NUM_LAYERS: tl.constexpr, N_PAD: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, N_PAD)
    inside = lane < num
    ids = tl.load(unique_ptr + lane, mask=inside, other=0)
    key = tl.load(token_ptr) * NUM_LAYERS + layer
    tl.store(keys_ptr + ids, key + tl.zeros((N_PAD,), tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num", "lead"])
def _lrfu_kernel(
    unique_ptr: tl.tensor, keys_ptr: tl.tensor, scores_ptr: tl.tensor, gains_ptr: tl.tensor,
    token_ptr: tl.tensor, num: tl.tensor, decay: tl.tensor, lead: tl.tensor,
    LAST_ENTRY: tl.constexpr, FRACTION_BITS: tl.constexpr, DECAY_BITS: tl.constexpr,
    STEP_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr, N_PAD: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, N_PAD)
    inside = lane < num
    ids = tl.load(unique_ptr + lane, mask=inside, other=0)
    score = tl.load(scores_ptr + ids, mask=inside, other=0)
    token = tl.load(token_ptr)
    now = ((token * decay) >> (DECAY_BITS - FRACTION_BITS)) + lead
    SHIFT: tl.constexpr = FRACTION_BITS - STEP_BITS
    distance = tl.where(score > now, score - now, now - score)
    entry = tl.minimum(distance >> SHIFT, LAST_ENTRY)
    gain = tl.load(gains_ptr + 2 * entry)
    slope = tl.load(gains_ptr + 2 * entry + 1)
    gain -= (slope * (distance & ((1 << SHIFT) - 1))) >> SHIFT
    score = tl.maximum(score, now) + gain
    tl.store(scores_ptr + ids, score, mask=inside)
    tl.store(keys_ptr + ids, (score << TOKEN_BITS) | token, mask=inside)


def _lru(policy: Lru) -> Touch:
    def touch(unique: Tensor, step: Step) -> None:
        _lru_kernel[(1,)](
            unique, policy.keys, step.token, unique.numel(), step.layer,
            NUM_LAYERS=policy.space.num_layers, N_PAD=_padded(unique), num_warps=1,
        )  # fmt: skip

    return touch


def _lrfu(policy: Lrfu) -> Touch:
    def touch(unique: Tensor, step: Step) -> None:
        _lrfu_kernel[(1,)](
            unique, policy.keys, policy.scores, policy.gains, step.token, unique.numel(),
            policy.scaled_decay, policy.lead(step.phase),
            LAST_ENTRY=len(policy.gains) - 1, FRACTION_BITS=policy.fraction_bits,
            DECAY_BITS=DECAY_BITS, STEP_BITS=STEP_BITS, TOKEN_BITS=TOKEN_BITS,
            N_PAD=_padded(unique), num_warps=1,
        )  # fmt: skip

    return touch


def _succession(policy: Succession) -> Touch:
    arrivals = new_arrivals(policy.keys.device)

    def touch(unique: Tensor, step: Step) -> None:
        launch_succession(policy, unique, step, arrivals)

    return touch


_FUSED: dict[type[CachePolicy], Callable[..., Touch]] = {
    Lru: _lru,
    Lrfu: _lrfu,
    Succession: _succession,
}


def touch_of(policy: CachePolicy) -> Touch:
    """The fastest form of the policy's touch; unique int64 [N] as `CachePolicy.touch` takes it."""
    fused = _FUSED.get(type(policy))
    return policy.touch if fused is None else fused(policy)


def _padded(unique: Tensor) -> int:
    return max(32, int(triton.next_power_of_2(unique.numel())))
