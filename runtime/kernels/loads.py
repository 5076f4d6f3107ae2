"""How a kernel loads a tile of a matrix, in each format: jitted functions chosen by class.

`load(row_ptr, offset_bytes, n, begin, N, K, kept, BLOCK_K)` is the tile of rows n (int32
[BLOCK_N]) and columns begin to begin + BLOCK_K of the matrix [N, K] whose first part lies
offset_bytes into the row (uint8). begin is a multiple of BLOCK_K. Rows that are not kept (mask
[BLOCK_N], None for all) and columns past K are zero. Columns are in their natural order, the
values dequantised but for the factor `outer(row_ptr, offset_bytes, half, N, K)`: one fp32 for the
first (half 0) or the last (1) N / 2 rows, which is applied to sums.

A matrix's parts follow one another at the next 64 bytes, so all are found from N and K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from residency.runtime.formats import ExpertFormat, Fp8Block, Mxfp4, Nvfp4, Plain


class Loads(NamedTuple):
    """A format's jitted functions."""

    load: Any
    outer: Any


_ALIGNMENT = tl.constexpr(64)
_FP8_BLOCK = tl.constexpr(128)
# Four-bit codes come as fp32 smaller by 2^126 (see `_codes`); a factor brings them back.
_CODE_BIAS = tl.constexpr(2.0**126)
_NVFP4_BIAS = tl.constexpr(2.0**117)  # times the largest e4m3 it is finite still
_NVFP4_REST = tl.constexpr(2.0**9)
_E4M3_BIAS = tl.constexpr(2.0**120)


@triton.jit
def _no_outer(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, half: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr,
) -> tl.constexpr:  # fmt: skip
    return 1.0


@triton.jit
def _load(
    at: tl.tensor, k: tl.tensor, END: tl.constexpr, kept: tl.tensor, MASKED: tl.constexpr
) -> tl.tensor:
    """[BLOCK_N, len(k)] at the pointers, zero in rows not kept and, if MASKED, where k >= END."""
    if kept is None and not MASKED:
        found = tl.load(at)
    elif kept is None:
        found = tl.load(at, mask=(k < END)[None, :], other=0)
    elif MASKED:
        found = tl.load(at, mask=kept[:, None] & (k < END)[None, :], other=0)
    else:
        found = tl.load(at, mask=kept[:, None], other=0)
    return found


@triton.jit
def _plain(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, K: tl.constexpr,
    kept: tl.tensor, BLOCK_K: tl.constexpr, ELEMENT: tl.constexpr, N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    matrix = (row_ptr + offset_bytes).to(tl.pointer_type(ELEMENT))
    k = begin + tl.arange(0, BLOCK_K)
    at = matrix + (n[:, None] * N_STRIDE + k[None, :] * K_STRIDE)
    return _load(at, k, K, kept, K % BLOCK_K != 0)


@triton.jit
def _load_bf16(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return _plain(row_ptr, offset_bytes, n, begin, K, kept, BLOCK_K, tl.bfloat16, K, 1)


@triton.jit
def _load_fp16(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return _plain(row_ptr, offset_bytes, n, begin, K, kept, BLOCK_K, tl.float16, K, 1)


@triton.jit
def _load_fp32(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return _plain(row_ptr, offset_bytes, n, begin, K, kept, BLOCK_K, tl.float32, K, 1)


@triton.jit
def _load_bf16_transposed(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return _plain(row_ptr, offset_bytes, n, begin, K, kept, BLOCK_K, tl.bfloat16, 1, N)


@triton.jit
def _load_fp16_transposed(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return _plain(row_ptr, offset_bytes, n, begin, K, kept, BLOCK_K, tl.float16, 1, N)


@triton.jit
def _load_fp32_transposed(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return _plain(row_ptr, offset_bytes, n, begin, K, kept, BLOCK_K, tl.float32, 1, N)


@triton.jit
def _load_fp8_block(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    MASKED: tl.constexpr = K % BLOCK_K != 0
    SCALE_BYTES: tl.constexpr = (N * K + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    BLOCKS: tl.constexpr = (K + _FP8_BLOCK - 1) // _FP8_BLOCK
    k = begin + tl.arange(0, BLOCK_K)
    codes = _load(row_ptr + offset_bytes + (n[:, None] * K + k[None, :]), k, K, kept, MASKED)
    tile = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scale_ptr = (row_ptr + offset_bytes + SCALE_BYTES).to(tl.pointer_type(tl.float32))
    PER_TILE: tl.constexpr = (BLOCK_K + _FP8_BLOCK - 1) // _FP8_BLOCK
    block = begin // _FP8_BLOCK + tl.arange(0, PER_TILE)
    at = scale_ptr + ((n // _FP8_BLOCK)[:, None] * BLOCKS + block[None, :])
    scale = _load(at, block, BLOCKS, kept, MASKED)
    if PER_TILE == 1:
        tile = tile * scale
    else:
        blocks = tl.reshape(tile, (n.shape[0], PER_TILE, _FP8_BLOCK)) * scale[:, :, None]
        tile = tl.reshape(blocks, (n.shape[0], BLOCK_K))
    return tile


@triton.jit
def _codes(groups: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """fp32 [BLOCK_N, 16 G] of int64 [BLOCK_N, G], sixteen e2m1 codes each: in order, over 2^126.

    At the top of a word, a shift down repeats the sign and puts the three other bits where fp32
    has the low bits of its exponent and the first of its mantissa. 0.5 is subnormal then.
    """
    words = tl.join(groups.to(tl.int32), (groups >> 32).to(tl.int32))
    even = tl.join(tl.join(words << 28, words << 12), tl.join(words << 20, words << 4))
    odd = tl.join(tl.join(words << 24, words << 8), tl.join(words << 16, words))
    tops = tl.reshape(tl.join(even, odd), (groups.shape[0], 16 * GROUPS))
    bits = (tops >> 6) & -0x7E400000  # 0x81C00000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _spread(factor: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """[BLOCK_N, G] -> [BLOCK_N, 16 G], in the threads that have the group's codes."""
    two = tl.join(factor, factor)
    four = tl.join(two, two)
    eight = tl.join(four, four)
    return tl.reshape(tl.join(eight, eight), (factor.shape[0], 16 * GROUPS))


@triton.jit
def _groups(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """int64 [BLOCK_N, BLOCK_K / 16]: sixteen codes each; and int32 [BLOCK_N, BLOCK_K / GROUP]:
    the bytes of the scales.
    """
    MASKED: tl.constexpr = K % BLOCK_K != 0
    SCALE_BYTES: tl.constexpr = (N * K // 2 + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    group = begin // 16 + tl.arange(0, BLOCK_K // 16)
    ptr = (row_ptr + offset_bytes).to(tl.pointer_type(tl.int64))
    groups = _load(ptr + (n[:, None] * (K // 16) + group[None, :]), group, K // 16, kept, MASKED)
    scale = begin // GROUP + tl.arange(0, BLOCK_K // GROUP)
    ptr = row_ptr + offset_bytes + SCALE_BYTES
    at = ptr + (n[:, None] * (K // GROUP) + scale[None, :])
    return groups, _load(at, scale, K // GROUP, kept, MASKED).to(tl.int32)


@triton.jit
def _load_nvfp4(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Smaller by 2^9, which `_outer_nvfp4` makes up for; exact in bf16 and fp16 as well."""
    groups, scale = _groups(row_ptr, offset_bytes, n, begin, N, K, kept, BLOCK_K, 16)
    bits = ((scale << 24) >> 4) & -0x78100000  # 0x87F00000: as in `_codes`
    factor = bits.to(tl.float32, bitcast=True) * _E4M3_BIAS * _NVFP4_BIAS
    return _codes(groups, BLOCK_K // 16) * _spread(factor, BLOCK_K // 16)


@triton.jit
def _outer_nvfp4(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, half: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    SCALE_BYTES: tl.constexpr = (N * K // 2 + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    AFTER: tl.constexpr = (N * K // 16 + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    outer_ptr = (row_ptr + offset_bytes + SCALE_BYTES + AFTER).to(tl.pointer_type(tl.float32))
    return tl.load(outer_ptr + half) * _NVFP4_REST


@triton.jit
def _load_mxfp4(
    row_ptr: tl.tensor, offset_bytes: tl.tensor, n: tl.tensor, begin: tl.tensor, N: tl.constexpr,
    K: tl.constexpr, kept: tl.tensor, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    groups, scale = _groups(row_ptr, offset_bytes, n, begin, N, K, kept, BLOCK_K, 32)
    # Its exponent's place; 0 stands for 2^-127, which is subnormal, and 255 for no number.
    ends = tl.where((scale == 0) | (scale == 255), 0x400000, 0)
    factor = ((scale << 23) | ends).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.join(factor, factor), (n.shape[0], BLOCK_K // 16))
    codes = _codes(groups, BLOCK_K // 16) * _CODE_BIAS
    return codes * _spread(factor, BLOCK_K // 16)


_PLAIN = {
    (torch.bfloat16, False): _load_bf16,
    (torch.float16, False): _load_fp16,
    (torch.float32, False): _load_fp32,
    (torch.bfloat16, True): _load_bf16_transposed,
    (torch.float16, True): _load_fp16_transposed,
    (torch.float32, True): _load_fp32_transposed,
}
_QUANTISED = {
    Fp8Block: Loads(_load_fp8_block, _no_outer),
    Nvfp4: Loads(_load_nvfp4, _outer_nvfp4),
    Mxfp4: Loads(_load_mxfp4, _no_outer),
}


def loads_of(format: ExpertFormat) -> Loads | None:
    """The format's functions, or None where kernels cannot read it."""
    if isinstance(format, Plain):
        load = _PLAIN.get((format.dtype, format.transposed))
        return None if load is None else Loads(load, _no_outer)
    return _QUANTISED.get(type(format))
