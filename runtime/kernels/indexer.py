"""Which blocks of keys a query attends to: the best by the indexer's score, and the open block.

A block counts once it is complete before or with the query's own token. Its score is the sum over
the indexer's heads of the positive part of their products, in fp32; the best `budget` blocks are
selected, equal scores in the order of torch's top-k. The tokens behind the last complete block are
always attended to.

Further legend: B sequences, S tokens of a sequence in this step, M indexer's query heads, I their
dim, P blocks, K budget.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS_PER_PROGRAM = 64
SCORES_BYTES = 256 << 20  # of the products of a chunk's queries that are held at once


def score_blocks(
    index_q_BSMI: Tensor, blocks_BPI: Tensor, position: Tensor | int, block: int
) -> Tensor:
    """fp32 [B, S, P], -inf for blocks that are not complete; position: of the first token."""
    steps, num_blocks = index_q_BSMI.shape[1], blocks_BPI.shape[1]
    products = index_q_BSMI.float() @ blocks_BPI.float().mT[:, None]
    scores = products.relu().sum(2) / math.sqrt(index_q_BSMI.shape[-1])
    at = position + torch.arange(1, steps + 1, device=scores.device)
    complete = (at // block)[:, None] > torch.arange(num_blocks, device=scores.device)
    return scores.masked_fill(~complete, float("-inf"))


@triton.jit
def _score_kernel(
    q_ptr: tl.tensor, blocks_ptr: tl.tensor, position_ptr: tl.tensor, scores_ptr: tl.tensor,
    num_blocks: tl.tensor, root: tl.tensor, HEADS: tl.constexpr, I_DIM: tl.constexpr,
    BLOCK: tl.constexpr, PER_PROGRAM: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    complete = (tl.load(position_ptr).to(tl.int32) + 1) // BLOCK
    there = (block < num_blocks) & (block < complete)
    i = tl.arange(0, I_DIM)[None, :]
    row = blocks_ptr + (batch * num_blocks + block[:, None]) * I_DIM
    keys = tl.load(row + i, mask=there[:, None], other=0.0).to(tl.float32)
    total = tl.zeros((PER_PROGRAM,), tl.float32)
    for head in tl.static_range(HEADS):
        q = tl.load(q_ptr + (batch * HEADS + head) * I_DIM + i).to(tl.float32)
        total += tl.maximum(tl.sum(keys * q, axis=1), 0.0)
    total = tl.where(there, total / root, float("-inf"))
    tl.store(scores_ptr + batch * num_blocks + block, total, mask=block < num_blocks)


def launch_score_blocks(
    index_q_BSMI: Tensor, blocks_BPI: Tensor, position: Tensor, block: int
) -> Tensor:
    """Triton form of `score_blocks` for one token, without a host sync; contiguous, I a power of
    two.
    """
    batch, steps, heads, dim = index_q_BSMI.shape
    assert steps == 1, f"{steps} tokens, but a step has one"
    num_blocks = blocks_BPI.shape[1]
    scores = torch.empty(batch, 1, num_blocks, dtype=torch.float32, device=blocks_BPI.device)
    _score_kernel[(triton.cdiv(num_blocks, _BLOCKS_PER_PROGRAM), batch)](
        index_q_BSMI, blocks_BPI, position, scores, num_blocks, math.sqrt(dim), HEADS=heads,
        I_DIM=dim, BLOCK=block, PER_PROGRAM=_BLOCKS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return scores


def select_few(
    index_q_BSMI: Tensor, blocks_BPI: Tensor, position: Tensor, block: int, k: int
) -> Tensor:
    """int64 [B, k], one token's blocks by falling score: those that are not complete come last."""
    scores = launch_score_blocks(index_q_BSMI, blocks_BPI, position, block)
    return scores[:, 0].topk(k, dim=-1).indices


def select_mask(
    index_q_BSMI: Tensor, blocks_BPI: Tensor, begin: int, block: int, budget: int
) -> Tensor:
    """bool [B, S, P]: the selected blocks of a chunk's queries behind `begin` tokens."""
    scores = score_blocks(index_q_BSMI, blocks_BPI, begin, block)
    if budget >= scores.shape[-1]:
        return scores > float("-inf")
    best = scores.topk(budget, dim=-1).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return mask.logical_and_(scores > float("-inf"))


def queries_at_once(batch: int, heads: int, num_blocks: int) -> int:
    """Queries whose products with all blocks take at most SCORES_BYTES, 16 at least."""
    return max(16, SCORES_BYTES // (4 * batch * heads * max(1, num_blocks)) // 16 * 16)
