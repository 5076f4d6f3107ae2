"""Causal depthwise convolutions over a few tokens, with the tokens before a step kept as state.

A state [B, C, L] holds the last L inputs of each channel, oldest first, zeros before the first
token; L covers what the taps reach back. Tap j of K reads (K - 1 - j) * dilation tokens back.

Further legend: B sequences, S tokens of a sequence in this step, C channels, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_C = 256
_BLOCK_S = 8


def short_conv(x_BSC: Tensor, state_BCL: Tensor, weight_CK: Tensor, dilation: int = 1) -> Tensor:
    """silu(convolution), [B, S, C]; the state moves on by S tokens. One rounding before silu."""
    steps, length = x_BSC.shape[1], state_BCL.shape[2]
    taps = weight_CK.shape[1]
    seen = torch.cat([state_BCL.transpose(1, 2), x_BSC], dim=1)
    total = torch.zeros(x_BSC.shape, dtype=torch.float32, device=x_BSC.device)
    for tap in range(taps):
        begin = length - (taps - 1 - tap) * dilation
        total += seen[:, begin : begin + steps].float() * weight_CK[:, tap].float()
    state_BCL.copy_(seen[:, -length:].transpose(1, 2))
    return F.silu(total.to(x_BSC.dtype))


@triton.jit
def _conv_kernel(
    x_ptr: tl.tensor, state_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor,
    num_steps: tl.tensor, num_channels: tl.tensor, x_stride: tl.tensor, TAPS: tl.constexpr,
    DILATION: tl.constexpr, LENGTH: tl.constexpr, LENGTH_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, KEEP: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c = channel[None, :]
    there = c < num_channels
    x_base = x_ptr + batch * num_steps * x_stride
    state_base = state_ptr + batch * num_channels * LENGTH
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        source = t - (TAPS - 1 - tap) * DILATION
        real = there & (t < num_steps)
        new = tl.load(
            x_base + source.to(tl.int64) * x_stride + c, mask=real & (source >= 0), other=0.0
        )
        old = tl.load(
            state_base + c * LENGTH + LENGTH + source, mask=real & (source < 0), other=0.0
        )
        weight = tl.load(weight_ptr + c * TAPS + tap, mask=there, other=0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight.to(tl.float32)
    rounded = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    at = (batch * num_steps + t) * num_channels + c
    tl.store(out_ptr + at, rounded / (1.0 + tl.exp(-rounded)), mask=there & (t < num_steps))
    if KEEP:
        tl.debug_barrier()  # all taps have read the state before it moves on
        _move_on(x_base, state_base, channel, num_steps, num_channels, x_stride, LENGTH, LENGTH_PAD)


@triton.jit
def _move_on(
    x_base: tl.tensor, state_base: tl.tensor, channel: tl.tensor, num_steps: tl.tensor,
    num_channels: tl.tensor, x_stride: tl.tensor, LENGTH: tl.constexpr, LENGTH_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """The state's last tokens after the step: from the step, and from the state before it."""
    c = channel[:, None]
    place = tl.arange(0, LENGTH_PAD)[None, :]
    there = (c < num_channels) & (place < LENGTH)
    source = place - LENGTH + num_steps
    new = tl.load(
        x_base + source.to(tl.int64) * x_stride + c, mask=there & (source >= 0), other=0.0
    )
    old = tl.load(state_base + c * LENGTH + place + num_steps, mask=there & (source < 0), other=0.0)
    tl.debug_barrier()  # other threads write the places that this one has read
    kept = (new.to(tl.float32) + old.to(tl.float32)).to(new.dtype)
    tl.store(state_base + c * LENGTH + place, kept, mask=there)


@triton.jit
def _move_on_kernel(
    x_ptr: tl.tensor, state_ptr: tl.tensor, num_steps: tl.tensor, num_channels: tl.tensor,
    x_stride: tl.tensor, LENGTH: tl.constexpr, LENGTH_PAD: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    _move_on(
        x_ptr + batch * num_steps * x_stride, state_ptr + batch * num_channels * LENGTH, channel,
        num_steps, num_channels, x_stride, LENGTH, LENGTH_PAD,
    )  # fmt: skip


def launch_short_conv(
    x_BSC: Tensor, state_BCL: Tensor, weight_CK: Tensor, dilation: int = 1
) -> Tensor:
    """Triton form of `short_conv`, one launch for few tokens, else two.

    x may be columns of a wider contiguous tensor [B, S, width]; state and weight contiguous.
    """
    batch, steps, channels = x_BSC.shape
    length, taps = state_BCL.shape[2], weight_CK.shape[1]
    assert length >= (taps - 1) * dilation, f"a state of {length} tokens is too short"
    out = x_BSC.new_empty(batch, steps, channels)
    pad = triton.next_power_of_2(length)
    x_stride = x_BSC.stride(1)
    together = steps <= _BLOCK_S
    block_s = triton.next_power_of_2(steps) if together else _BLOCK_S
    grid = triton.cdiv(channels, _BLOCK_C), triton.cdiv(steps, block_s), batch
    _conv_kernel[grid](
        x_BSC, state_BCL, weight_CK, out, steps, channels, x_stride, TAPS=taps,
        DILATION=dilation, LENGTH=length, LENGTH_PAD=pad, BLOCK_S=block_s, BLOCK_C=_BLOCK_C,
        KEEP=together, num_warps=4,
    )  # fmt: skip
    if not together:
        _move_on_kernel[(grid[0], batch)](
            x_BSC, state_BCL, steps, channels, x_stride, LENGTH=length, LENGTH_PAD=pad,
            BLOCK_C=_BLOCK_C, num_warps=4,
        )  # fmt: skip
    return out
