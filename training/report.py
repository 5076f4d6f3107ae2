"""Measure the finished checkpoint, from the very files that were saved."""

import json
import math
from pathlib import Path
from typing import Any

import measure
import torch
from demo_model import DENSE
from settings import Settings
from transformers import AutoModelForCausalLM, AutoTokenizer


def same_function(folder: Path, device: torch.device, ids: torch.Tensor) -> dict[str, float]:
    """Largest difference in logits between the dense form and the library's own, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    logits = []
    with torch.no_grad():
        for name in ("eager", DENSE):
            model.set_experts_implementation(name)
            logits.append(model(input_ids=ids, use_cache=False).logits)
    torch.set_float32_matmul_precision(precision)
    worst = (logits[0] - logits[1]).abs().max().item()
    return {"dense_vs_eager_max_logit_difference": worst, "logit_std": logits[0].std().item()}


def measured(
    folder: Path, data: Path, settings: Settings, ids: torch.Tensor
) -> tuple[dict[str, Any], str]:
    """Held-out losses and routing habits of the bf16 weights, and samples from them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(ids.device).eval()
    model.set_experts_implementation(DENSE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    corpora = json.loads((data / "corpus.json").read_text())
    short, windows = settings.short, settings.heldout_windows
    losses = measure.domain_losses(model, data, short, settings.final_windows, 16)
    density = {c["name"]: c["heldout_tokens"] / c["heldout_bytes"] for c in corpora}
    facts = {
        "heldout_nats_per_token": losses,
        "heldout_bits_per_byte": {n: x * density[n] / math.log(2) for n, x in losses.items()},
        "heldout_loss_by_position": measure.by_position(model, data, settings.long, 3),
        **measure.routing(model, data, short, windows, 16),
        **same_function(folder, ids.device, ids),
        "corpora": corpora,
    }
    return facts, measure.samples(model, tokenizer, settings.sample_tokens)
