"""e2m1, the four-bit float: a sign, two bits of exponent, one of mantissa; two codes to a byte.

The even column's code is in the low nibble.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code
MAX = MAGNITUDES[-1]
VALUES = (*MAGNITUDES, *(-m for m in MAGNITUDES))  # bit 3 is the sign
_MIDDLES = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., k / 2] -> the values [..., k] in dtype."""
    pairs = [(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)]
    table = torch.tensor(pairs, dtype=dtype, device=packed.device)
    return torch.nn.functional.embedding(packed.int(), table).flatten(-2)


def pack(values: Tensor) -> Tensor:
    """[..., k] -> uint8 [..., k / 2], nearest, ties to the even code, past the largest clamped."""
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for number, middle in enumerate(_MIDDLES):
        tie_goes_up = number % 2 == 1
        code += magnitude >= middle if tie_goes_up else magnitude > middle
    code |= torch.signbit(values).to(torch.uint8) << 3
    even, odd = code.unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = even | (odd << 4)
    return packed
