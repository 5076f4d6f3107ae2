"""Time of a decoder layer's kernels other than its experts', apart and one after another.

python benchmarks/kernels/dense.py --out FOLDER [--early]

Few tokens: norm and projections, attention over a static cache, and the router, over their
candidates; then all of a layer without its experts, by context. Chunks: the same of a layer, by
length and position. The layer is Qwen3-30B-A3B's; the router is also Flash-Next-MoE's. Weights and
caches are random; results are first held against the definitions in more bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as F
from parts import EPS, Layer, Sizes, angles, check_attention, check_chunk, check_products
from parts import check_router
from timing import Bench
from torch import Tensor
