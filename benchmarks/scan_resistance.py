"""Miss rates of decode around a long prompt, by what of the prompt counts for the cache.

python benchmarks/scan_resistance.py --out FOLDER [--slots 25%]

Two texts, A and B, each a sequence of its own over one pool:

    A: a prompt of 256 tokens, 192 tokens decoded to warm the pool, 64 more: "before"
    B: a prompt of 8,192 tokens in chunks of 512
    B: 64 tokens decoded: "after"; and from the slots that the prompt left, A's next 64: "return"

Each is told for the first 8 tokens as well. "reference" is "after" where the prompt went by
unnoticed: always_stream, prefill_tokens=0.

Routes are written down first and then led through the executors with their slots, copies and
counters, but without the arithmetic, on the CPU: counts depend on routes alone, and are the same on
every device. The routes are those of the demo model over texts of this repository; those recorded
of gpt-oss-20b, of many requests one after another (tests/data); and skewed ones, made up, which
follow one law in A and in B. Legend: N tokens of a text, T of a step, L layers, K experts a token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from residency.conf import build_engine, compose
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.architecture import Architecture
from residency.runtime.cache_sizes import capacity_for
from residency.runtime.engine import Engine
from residency.runtime.environment import environment
from residency.runtime.experts import Call
from residency.runtime.offload import OffloadRuntime
from residency.runtime.route_tables import skewed
from residency.runtime.sequence import Sequence
from residency.runtime.traces import read_trace
from residency.runtime.weights import MadeUpWeights

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "tests" / "data" / "gpt-oss-20b_decode.npz"
PROMPT_A, WARM, COUNTED, PROMPT_B = 256, 192, 64, 8192
SIZE_A, SIZE_B = PROMPT_A + WARM + 2 * COUNTED, PROMPT_B + COUNTED
CHUNK = 512
FEW = 8
MODES = {
    "always_stream": (f"prefill.chunk_tokens={CHUNK}",),
    "demand": (f"prefill.chunk_tokens={CHUNK}", f"prefill.max_tokens={CHUNK}"),
}
REFERENCE = "always_stream"
CACHES: dict[str, list[dict[str, Any]]] = {
    "lru": [{"prefill_tokens": last} for last in ("all", 16, 0)],
    "lrfu": [
        *({"prefill_tokens": last} for last in ("all", 64, 16, 0)),
        {"prefill_tokens": "all", "prefill_weight": 0.05},
        *({"decay": 0.001, "prefill_tokens": last} for last in ("all", 16, 0)),
        {"decay": 0.001, "prefill_tokens": "all", "prefill_weight": 0.05},
    ],
}


class Case(NamedTuple):
    """Two texts as routes, int64 [N, L, K] ids within the layer."""

    name: str
    space: IdSpace
    a_NLK: torch.Tensor
    b_NLK: torch.Tensor


class NoMaths:
    """Stands in for the arithmetic: nothing that is counted depends on it."""

    has_residents = False

    def __init__(self, x_TH: torch.Tensor | None = None) -> None:
        self.x_TH = x_TH

    def begin(self, call: Call, slots_E: torch.Tensor | None = None) -> NoMaths:
        return NoMaths(call.x_TH)

    def run(self, work: NoMaths, experts: list[int], rows: list[int]) -> None:
        pass

    def combined(self) -> torch.Tensor | None:
        return self.x_TH


class Heard:
    """Takes a recorder's place and keeps the routes of prefilled tokens."""

    def __init__(self, num_layers: int) -> None:
        self.chunks: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def record(self, step: Step, ids_TK: torch.Tensor) -> None:
        self.chunks[step.layer].append(ids_TK.cpu())

    @property
    def table_NLK(self) -> torch.Tensor:
        return torch.stack([torch.cat(chunks) for chunks in self.chunks], dim=1)


class Course:
    """The course above over one runtime."""

    def __init__(self, runtime: OffloadRuntime, case: Case) -> None:
        self.runtime = runtime
        runtime._prefill.maths = runtime._decode.maths = NoMaths()
        self.table_NLK = torch.cat([case.a_NLK, case.b_NLK])

    @torch.inference_mode()
    def rates(self) -> dict[str, float]:
        """Misses per lookup of decode."""
        at = PROMPT_A + WARM
        self._prefill(0, PROMPT_A)
        self._decode(PROMPT_A, WARM)
        rates = self._counted("before", at)
        self._prefill(SIZE_A, PROMPT_B)
        kept = [(tensor, tensor.clone()) for tensor in self._state()]
        rates |= self._counted("after", SIZE_A + PROMPT_B)
        for tensor, value in kept:
            tensor.copy_(value)
        rates |= self._counted("return", at + COUNTED)
        self.runtime.check()
        return rates

    def _counted(self, name: str, place: int) -> dict[str, float]:
        """Over the first few tokens from `place` on, and over all that count."""
        few = self._decode(place, FEW)
        rest = self._decode(place + FEW, COUNTED - FEW)
        misses, lookups = (sum(pair) for pair in zip(few, rest, strict=True))
        return {f"{name}_{FEW}": few[0] / few[1], name: misses / lookups}

    def _state(self) -> Iterator[torch.Tensor]:
        """All that the slots and the policy hold."""
        pool = self.runtime.pool
        yield from (pool.slot_of, pool.id_of, self.runtime.rows, self.runtime.clock)
        yield from pool.policy.state().values()

    def _prefill(self, place: int, num_tokens: int) -> None:
        for start in range(0, num_tokens, CHUNK):
            size = min(CHUNK, num_tokens - start)
            self._step(Phase.PREFILL, place + start, size, num_tokens - start - size)

    def _decode(self, place: int, num_tokens: int) -> tuple[int, int]:
        """Misses and lookups."""
        self.runtime.counters.reset()
        for start in range(num_tokens):
            self._step(Phase.DECODE, place + start, 1, 0)
        rows = [row for row in self.runtime.counters.rows() if row.phase == Phase.DECODE]
        return sum(row.misses for row in rows), sum(row.lookups for row in rows)

    def _step(self, phase: Phase, place: int, num_tokens: int, behind: int) -> None:
        x_TH = torch.empty(num_tokens, 1)
        with self.runtime.step(phase, num_tokens, behind):
            for layer, ids_TK in enumerate(self.table_NLK[place : place + num_tokens].unbind(1)):
                self.runtime.layer(layer, Call(None, x_TH, ids_TK, x_TH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slots", default="25%")
    options = parser.parse_args()
    base = ["device=cpu", f"cache.slots={options.slots}"]
    rows = [row for case in cases(base) for row in measured(case, base)]
    result = {
        "kind": "scan_resistance",
        "slots": options.slots,
        "tokens": {"warm": PROMPT_A + WARM, "prompt": PROMPT_B, "counted": COUNTED},
        "rows": rows,
        "environment": environment(torch.device("cpu")),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in result.pop("rows"))
    text = json.dumps(result, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    (options.out / "result.json").write_text(text)
    print(table(rows))


def cases(base: list[str]) -> Iterator[Case]:
    with build_engine(compose([*base, "cache.slots=all"])) as engine:
        space = engine.architecture.space
        prose = joined("docs/*.md", "README.md", "tests/data/*.txt")
        code = joined("runtime/*.py")
        a_NLK, b_NLK = heard(engine, prose)[:SIZE_A], heard(engine, code)
    yield Case("demo, prose then code", space, a_NLK, b_NLK)
    space, layers = IdSpace(24, 32, 4), 8
    trace_NLK = read_trace(str(TRACE), space)[:, :layers].long()
    far = len(trace_NLK) // 2
    name = f"gpt-oss-20b, {layers} layers"
    space = IdSpace(layers, 32, 4)
    yield Case(name, space, trace_NLK[:SIZE_A], trace_NLK[far : far + SIZE_B])
    space = IdSpace(4, 512, 10)
    table_NLK = skewed(space, 0).table_NLK.long()
    name = "4 layers x 512, top 10, skewed"
    yield Case(name, space, table_NLK[:SIZE_A], table_NLK[SIZE_A : SIZE_A + SIZE_B])


def joined(*patterns: str) -> str:
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    return "\n\n".join(file.read_text() for file in files)


@torch.inference_mode()
def heard(engine: Engine, text: str) -> torch.Tensor:
    """The routes of the text's first SIZE_B tokens, int64 [N, L, K]."""
    ids_1N = torch.tensor([engine.tokenizer(text)["input_ids"][:SIZE_B]], device=engine.device)
    runtime = engine.runtime
    sequence = Sequence(engine.model, runtime, capacity_for(SIZE_B))
    runtime.recorder = listener = Heard(engine.architecture.space.num_layers)
    for ids_1T in ids_1N.split(CHUNK, dim=1):
        sequence.prefill(ids_1T)
    runtime.recorder = None
    sequence.restart()
    return listener.table_NLK


def measured(case: Case, base: list[str]) -> Iterator[dict[str, Any]]:
    policies = [
        (
            cache,
            params,
            mode,
            compose([*base, f"cache={cache}", *keys, f"prefill={mode}", *overrides]).policies,
        )
        for cache, choices in CACHES.items()
        for params in choices
        for keys in [[f"cache.{key}={value}" for key, value in params.items()]]
        for mode, overrides in MODES.items()
    ]
    architecture = tiny(case.space)
    weights, device = MadeUpWeights(architecture, 0), compose(base).device.open()
    with Engine(architecture, weights, policies[0][3], device) as engine:
        for cache, params, mode, chosen in policies:
            with engine.reconfigured(chosen):
                rates = Course(engine.runtime, case).rates()
            row = {"routes": case.name, "cache": cache, **params, "prefill": mode, **rates}
            print(json.dumps(row), flush=True)
            yield row


def tiny(space: IdSpace) -> Architecture:
    """A model of so many layers and experts, and as little else as can be."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        num_hidden_layers=space.num_layers,
        num_experts=space.num_experts,
        num_experts_per_tok=space.top_k,
        hidden_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=16,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=2 * PROMPT_B,
    )
    return Architecture.from_config(config, "float32", "tiny")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, misses in percent of lookups, over the first few tokens / over all."""
    shown = ("prefill_tokens", "decay", "prefill_weight")
    head = ["routes", "cache", "before"]
    head += [f"{mode}: {name}" for mode in MODES for name in ("after", "return")]
    lines = [[*head, "reference"], ["---"] * (len(head) + 1)]
    for start in range(0, len(rows), len(MODES)):
        group = rows[start : start + len(MODES)]
        first = group[0]
        (reference,) = (
            row
            for row in rows
            if row["prefill"] == REFERENCE and row["prefill_tokens"] == 0
            if all(row.get(key) == first.get(key) for key in ("routes", "cache", "decay"))
        )
        name = " ".join([first["cache"], *(f"{key}={first[key]}" for key in shown if key in first)])
        cells = [rate(row, name) for row in group for name in ("after", "return")]
        lines.append(
            [first["routes"], name, rate(first, "before"), *cells, rate(reference, "after")]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rate(row: dict[str, Any], name: str) -> str:
    return f"{100 * row[f'{name}_{FEW}']:.1f} / {100 * row[name]:.1f}"


if __name__ == "__main__":
    main()
