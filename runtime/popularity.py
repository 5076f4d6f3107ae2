"""How unevenly real routers use their experts, resampled to any model's layers and experts.

The profile counts in how many of P prompts an expert fired at least once. If it fires at a steady
rate, it is missing from a prompt with probability exp(-rate), so rate = -log(1 - share) in units of
one per prompt; share = (count + 1/2) / (P + 1) keeps both ends finite.
"""

from __future__ import annotations

import gzip
import importlib.resources
import json

import torch

from residency.policies.step import IdSpace

PROFILE = "qwen3-coder-next-4bit.json.gz"


def popularity(space: IdSpace, generator: torch.Generator) -> torch.Tensor:
    """float64 [L, E] shares, each layer's sum 1, in an order of experts drawn by `generator`.

    Layer l takes the profile's layer at the same depth; its experts take that layer's rates at
    evenly spaced quantiles.
    """
    profile_PE = profile_rates().sort(dim=1).values
    depth_L = torch.linspace(0, len(profile_PE) - 1, space.num_layers).round().long()
    quantiles_E = (torch.arange(space.num_experts, dtype=torch.float64) + 0.5) / space.num_experts
    rates_LE = torch.quantile(profile_PE[depth_L], quantiles_E, dim=1).T
    order_LE = torch.rand(rates_LE.shape, generator=generator).argsort(dim=1)
    rates_LE = rates_LE.gather(1, order_LE)
    return rates_LE / rates_LE.sum(dim=1, keepdim=True)


def profile_rates() -> torch.Tensor:
    """float64 [layers, experts] of the recorded model, firings per prompt."""
    file = importlib.resources.files("residency.runtime.profiles") / PROFILE
    profile = json.loads(gzip.decompress(file.read_bytes()))
    layers = [profile["layers"][str(layer)] for layer in range(profile["moe_layers"])]
    counts = torch.zeros(len(layers), profile["num_experts"], dtype=torch.float64)
    for layer, fired in enumerate(layers):
        for expert, count in fired["activation_counts"].items():
            counts[layer, int(expert)] = count
    share = (counts + 0.5) / (profile["num_prompts"] + 1)
    return -torch.log1p(-share)
