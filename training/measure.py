"""What is measured on held-out text: loss, load balance, reuse from token to token, samples.

Balance is the entropy of a layer's expert loads divided by that of an even load (1 is even).
Reuse is the share of a token's experts that the token before it used as well; experts picked at
random would give 4/32. The shift between two domains is the share of a layer's load that would have
to move to turn one domain's loads into the other's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from streams import IGNORED, heldout, load_corpora
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, Qwen3MoeForCausalLM

Report = dict[str, Any]
PROMPTS = {
    "python_code": "class Cache:\n    def __init__(self, size):\n",
    "python_docs": ".. function:: sorted_copy(iterable)\n\n   Return ",
    "sqlite_docs": "# 1. Overview\n\nThe query planner in SQLite ",
    "literature": "Enter KING HENRY and attendants\n\nKING.\n",
    "bible": "1 And it came to pass in those days, that ",
    "dialogue": "What makes a good story?",
}


@torch.no_grad()
def domain_losses(
    model: Qwen3MoeForCausalLM, data: Path, length: int, limit: int, rows: int
) -> dict[str, float]:
    """Mean held-out cross-entropy of every domain, in nats a token."""
    losses: dict[str, float] = {}
    for corpus in load_corpora(data):
        total, count = torch.zeros((), device=model.device), 0
        for ids in heldout(data, corpus["name"], length, limit, rows):
            each = token_losses(model, ids.to(model.device))
            total += each.sum()
            count += each.numel()
        losses[corpus["name"]] = (total / max(count, 1)).item()
    return losses


@torch.no_grad()
def token_losses(model: Qwen3MoeForCausalLM, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets = ids[:, 1:].reshape(-1)
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), targets, reduction="none", ignore_index=IGNORED
    )
    return each.view(ids.shape[0], -1)


@contextmanager
def watch_routers(model: Qwen3MoeForCausalLM) -> Iterator[list[Tensor]]:
    """Collects the chosen experts of every layer, in order, as (tokens, top-k)."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def reuse(index: Tensor) -> Tensor:
    """Mean share of experts a token has in common with the one before; index is (rows, t, k)."""
    same = index[:, 1:, :, None] == index[:, :-1, None, :]
    return same.any(-1).float().mean()


@torch.no_grad()
def routing(model: Qwen3MoeForCausalLM, data: Path, length: int, limit: int, rows: int) -> Report:
    """Loads by layer and domain, and reuse by layer."""
    config = model.config
    layers, experts, top = config.num_hidden_layers, config.num_experts, config.num_experts_per_tok
    corpora = load_corpora(data)
    loads = torch.zeros(len(corpora), layers, experts)
    again: list[Tensor] = []
    for domain, corpus in enumerate(corpora):
        for ids in heldout(data, corpus["name"], length, limit, rows):
            with watch_routers(model) as chosen:
                model(input_ids=ids.to(model.device), use_cache=False)
            counts = [c.flatten().bincount(minlength=experts) for c in chosen]
            loads[domain] += torch.stack(counts).cpu()
            again.append(torch.stack([reuse(c.view(*ids.shape, top)) for c in chosen]).cpu())
    by_domain = loads / loads.sum(-1, keepdim=True).clamp(min=1)
    return {
        **balance_of(by_domain),
        "adjacent_token_reuse": rounded(torch.stack(again).mean(0)),
        "adjacent_token_reuse_uniform": top / experts,
        "load_by_domain": {
            c["name"]: [rounded(row) for row in by_domain[i]] for i, c in enumerate(corpora)
        },
    }


def balance_of(by_domain: Tensor) -> Report:
    """Balance figures of (domain, layer, expert) loads, every domain counted alike."""
    load = by_domain.mean(0)
    even = torch.tensor(float(load.shape[-1]))
    entropy = -(load * load.clamp(min=1e-12).log()).sum(-1) / even.log()
    pairs = [(a, b) for a in range(len(by_domain)) for b in range(a)]
    moved = [(by_domain[a] - by_domain[b]).abs().sum(-1) / 2 for a, b in pairs]
    return {
        "load_entropy": rounded(entropy),
        "load_max_over_mean": rounded(load.max(-1).values * even),
        "load_min_over_mean": rounded(load.min(-1).values * even),
        "domain_shift": rounded(torch.stack(moved).mean(0)),
    }


def rounded(values: Tensor) -> list[float]:
    return [round(v, 4) for v in values.tolist()]


@torch.no_grad()
def by_position(model: Qwen3MoeForCausalLM, data: Path, length: int, rows: int) -> dict[str, float]:
    """Held-out loss by place in a long window: long prompts work if it does not rise."""
    losses = [
        token_losses(model, ids.to(model.device))[0].cpu()
        for corpus in load_corpora(data)
        for ids in heldout(data, corpus["name"], length, rows, 1)
    ]
    if not losses:
        return {}
    mean = torch.stack(losses).mean(0)
    edges = [0, *(e for e in (256, 1024, 2048, 4096, 8192, 16_384) if e < length), length]
    return {f"{a}-{b}": round(mean[a:b].mean().item(), 4) for a, b in pairwise(edges)}


@torch.no_grad()
def samples(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """One continuation a domain at temperature 0.8."""
    texts = []
    for name, prompt in PROMPTS.items():
        if name == "dialogue":
            message = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        torch.manual_seed(7)
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.8,
            top_k=0,
            max_new_tokens=tokens,
        )
        texts.append(f"===== {name} =====\n{tokenizer.decode(out[0])}\n")
    return "\n".join(texts)
