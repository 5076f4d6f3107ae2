"""Measure freetoken on a model folder with made-up weights; writes the bench's result.json.

python benchmarks/peers/freetoken_bench.py MODEL --slots N --out FOLDER [--even-routing]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import common
import torch

BLOCK = 1 << 26  # elements drawn once and repeated
CONTEXT = 12288
VOCABULARY = 1900  # of the toy tokenizer


def main() -> None:
    options = arguments()
    fill_quickly()
    if options.even_routing:
        route_evenly()
    with common.model_folder(options.model, options.layers, options.bfloat16) as folder:
        llm = load(folder, options)
        clock = Clock(llm, options)
        clock.seconds(64, 8)  # compiles
        lengths = sorted(int(text) for text in options.lengths.split(","))
        prefills = [common.prefill(n, clock.repeated(lambda n=n: clock.ttft(n))) for n in lengths]
        decode = measure_decode(llm, clock, options)
    routing = "even" if options.even_routing else "model (routers are made up too)"
    common.write(
        options,
        title(options),
        ("freetoken",),
        prefill=prefills,
        decode=decode,
        notes=["weights: made up", f"routing: {routing}"],
    )


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    add_engine_options(parser)
    parser.add_argument("--even-routing", action="store_true", help="random router scores")
    return parser.parse_args()


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, required=True, help="size of its expert cache")
    parser.add_argument("--hit-d2d", action="store_true", help="copy cached experts on the device")
    parser.add_argument(
        "--strategy", default="offload", choices=["offload", "hybrid", "cpu"], help="decode target"
    )
    parser.add_argument(
        "--max-fetch", type=int, default=-1, help="hybrid fetches a layer; -1: its own"
    )
    parser.add_argument("--bfloat16", action="store_true", help="ignore the config's quantization")


def title(options: argparse.Namespace) -> str:
    words = [f"freetoken, {options.slots} slots", f"hit-d2d {'on' if options.hit_d2d else 'off'}"]
    if options.strategy != "offload":
        words.append(options.strategy)
    if options.max_fetch >= 0:
        words.append(f"at most {options.max_fetch} fetches a layer")
    return ", ".join(words)


class Clock:
    """Times prompts of random tokens."""

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        self._llm = llm
        self._options = options
        self._draw = random.Random(options.seed)

    def seconds(self, length: int, new_tokens: int) -> float:
        """A prompt of `length` to its last new token."""
        from freetoken.core import SamplingParams

        ids = common.prompt(length, self._draw, VOCABULARY)
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._llm.generate([ids], sampling)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def ttft(self, length: int) -> float:
        return self.seconds(length, 1)

    def decode(self) -> float:
        """Seconds of the decode steps: a whole run less its prompt's part."""
        context, new = self._options.decode_context, self._options.decode_tokens
        first = self.seconds(context, 1)
        return self.seconds(context, 1 + new) - first

    def repeated(self, run: Callable[[], float]) -> list[float]:
        """Times after the warm-ups."""
        for _ in range(self._options.warmups):
            run()
        return [run() for _ in range(self._options.repeats)]


def load(folder: Any, options: argparse.Namespace) -> Any:
    from freetoken.llm import LLM

    return LLM(
        str(folder),
        use_dummy_weight=True,
        moe_strategy=options.strategy,
        moe_hybrid_max_fetch=options.max_fetch,
        moe_cache_size=options.slots,
        moe_prefill_hit_d2d=options.hit_d2d,
        num_token_override=16384,
        max_running_req=1,
        max_seq_len_override=CONTEXT,
        moe_collect_stats=True,
        decode_log_interval=1 << 30,  # each line of its log sets the counters of misses to 0
    )


def measure_decode(llm: Any, clock: Clock, options: argparse.Namespace) -> dict[str, Any]:
    """Times, and its own count of misses over them and the warm-ups."""
    cache = expert_cache(llm)
    if cache is None:
        return common.decode(options.decode_tokens, clock.repeated(clock.decode))
    cache.reset_stats()
    seconds = clock.repeated(clock.decode)
    miss_rate = cache.decode_miss_stats()["miss_rate"]
    return common.decode(
        options.decode_tokens, seconds, miss_rate=miss_rate, hit_rate=1 - miss_rate
    )


def expert_cache(llm: Any) -> Any:
    """Its expert slots and their counters; None for its cpu strategy."""
    engine = vars(llm.engine).values()
    return next((value for value in engine if type(value).__name__ == "OffloadMoeCache"), None)


def route_evenly() -> None:
    """Random scores instead of the router's: every expert as likely."""
    import freetoken.layers.moe as layers

    route = layers.fused_topk

    def even(*, gating_output: torch.Tensor, **rest: Any) -> Any:
        return route(gating_output=torch.randn_like(gating_output), **rest)

    layers.fused_topk = even


def fill_quickly() -> None:
    """Its filler draws every number of the banks on one core; repeat one block instead."""
    import freetoken.moe.expert_banks as banks

    slow = banks._dummy_fill

    def fill(role: str, tensor: torch.Tensor) -> Any:
        kinds = (torch.bfloat16, torch.uint8, torch.int32)
        if role.endswith(("_scale", "_global")) or tensor.dtype not in kinds:
            return slow(role, tensor)
        flat, block = tensor.view(-1), block_of(tensor.dtype)
        for part in flat.split(len(block)):
            part.copy_(block[: len(part)])
        return None

    banks._dummy_fill = fill


def block_of(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return (torch.randn(BLOCK, device="cuda") * 0.02).to(dtype).cpu()
    random_bytes = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, device="cuda")
    return random_bytes.cpu().view(dtype)


if __name__ == "__main__":
    main()
