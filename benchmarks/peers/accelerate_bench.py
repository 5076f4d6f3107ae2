"""Measure transformers with accelerate's CPU offload: experts in host memory, all else on the GPU.

    python benchmarks/peers/accelerate_bench.py MODEL --layers 4 --out FOLDER

Slow: accelerate brings a whole experts module to the GPU for each call. Few layers, short lengths.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from accelerate import dispatch_model
from transformers import AutoConfig, AutoModelForCausalLM

SCALE = 0.02


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(decode_tokens=16)
    options = parser.parse_args()
    with common.model_folder(options.model, options.layers, bfloat16=True) as folder:
        model = build(AutoConfig.from_pretrained(folder), options.seed)
    draw = random.Random(options.seed)
    vocabulary = model.config.vocab_size

    def seconds(length: int, new_tokens: int) -> float:
        ids = torch.tensor([common.prompt(length, draw, vocabulary)], device=device())
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        synchronize()
        return time.perf_counter() - start

    def repeated(run: Callable[[], float]) -> list[float]:
        for _ in range(options.warmups):
            run()
        return [run() for _ in range(options.repeats)]

    def decode() -> float:
        first = seconds(options.decode_context, 1)
        return seconds(options.decode_context, 1 + options.decode_tokens) - first

    lengths = sorted(int(text) for text in options.lengths.split(","))
    common.write(
        options,
        f"accelerate CPU offload, {model.config.num_hidden_layers} layers",
        ("accelerate",),
        prefill=[common.prefill(n, repeated(lambda n=n: seconds(n, 1))) for n in lengths],
        decode=common.decode(options.decode_tokens, repeated(decode)),
        notes=["weights: made up", "routing: model (routers are made up too)"],
    )


def build(config: Any, seed: int) -> Any:
    """A random model whose experts modules are offloaded to the CPU."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            block = torch.randn(min(parameter.numel(), 1 << 24)) * SCALE
            flat = parameter.data.view(-1)
            for part in flat.split(len(block)):
                part.copy_(block[: len(part)])
        else:
            parameter.data.fill_(1)
    reset_rotary(model, config)
    return dispatch_model(model.eval(), device_map_of(model), main_device=device())


def reset_rotary(model: Any, config: Any) -> None:
    """Buffers are computed, not loaded, so the meta device lost them."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config)
            module.inv_freq = fresh.inv_freq
            module.original_inv_freq = fresh.inv_freq


def device_map_of(model: Any) -> dict[str, str | int]:
    """Every leaf module on the GPU but the experts, which stay on the CPU."""
    found: dict[str, str | int] = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed"):
            found[name] = "cpu"
        elif not any(True for _ in module.children()) and ".experts" not in name:
            found[name] = device()
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{module}.") for module in found):
            found[name] = device()
    return found


def device() -> str | int:
    return 0 if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
