"""Time of one layer's admission and touch inside a CUDA graph, and the gather's rate.

python benchmarks/kernels/admission.py --out FOLDER [--slots 4096]

Each graph admits for 24 layers of 512 experts, with ids chosen so that each layer misses a given
number; the maps and keys are put back at its start, and the time of that alone is subtracted.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from timing import graph_us

from residency.policies.cache import CachePolicy
from residency.policies.cache.lrfu import Lrfu
from residency.policies.cache.lru import Lru
from residency.policies.cache.succession import Succession
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.environment import environment
from residency.runtime.kernels.admission import launch_admit
from residency.runtime.kernels.gather import FROM_HOST, GatherConfig, launch_gather
from residency.runtime.kernels.touch import Touch, touch_of
from residency.runtime.slots import SlotPool

DEVICE = torch.device("cuda")
LAYERS, EXPERTS = 24, 512
SPACE = IdSpace(2 * LAYERS, EXPERTS, 10)  # the upper half of the layers only fills slots
GATHERS = [
    FROM_HOST,
    GatherConfig(32, 8192, 4),
    GatherConfig(64, 4096, 4),
    GatherConfig(64, 8192, 4),
    GatherConfig(132, 2048, 2),
    GatherConfig(132, 4096, 4),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=4096)
    options = parser.parse_args()
    rows = [
        {"policy": name, "ids": num, "misses": misses, "slots": options.slots, "us": us}
        for num in (8, 16, 32, 64)
        for misses in sorted({0, 1, 8, num})
        for name, us in admissions(options.slots, num, misses)
    ]
    result = {
        "kind": "admission",
        "admission": rows,
        "refresh_us": refreshes(),
        "gather": list(gathers()),
        "environment": environment(DEVICE),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)
    for row in result["gather"]:
        print(row)


def admissions(num_slots: int, num: int, misses: int) -> list[tuple[str, float]]:
    """Microseconds a layer, admission and touch together, by policy and form of its touch."""
    times = []
    for name, policy, fused in (
        ("lru", Lru(Lru.Config()), True),
        ("lrfu", Lrfu(Lrfu.Config()), True),
        ("succession", Succession(Succession.Config()), True),
        ("lru, touch in torch operations", Lru(Lru.Config()), False),
        ("lrfu, touch in torch operations", Lrfu(Lrfu.Config()), False),
        ("succession, touch in torch operations", Succession(Succession.Config()), False),
    ):
        pool = SlotPool(SPACE, num_slots, policy, DEVICE)
        ids = fill(pool, num, misses)
        touch = touch_of(policy) if fused else policy.touch
        times.append((name, layer_us(pool, ids, touch)))
    return times


def refreshes() -> dict[str, float]:
    """Microseconds a token of what a policy does at its start, for all layers."""
    found = {}
    for policy in (Lru(Lru.Config()), Lrfu(Lrfu.Config()), Succession(Succession.Config())):
        policy.allocate(SPACE, DEVICE)
        step = Step(torch.tensor(1 << 20, device=DEVICE), 0, Phase.DECODE)
        does = type(policy).refresh is not CachePolicy.refresh
        found[policy.name] = graph_us([partial(policy.refresh, step)]) if does else 0.0
    return found


def fill(pool: SlotPool, num: int, misses: int) -> list[torch.Tensor]:
    """Full slots; per layer, ids of which so many are absent. Ids of the upper layers go first."""
    generator = torch.Generator().manual_seed(num * 100 + misses)
    wanted, resident = [], []
    for layer in range(LAYERS):
        experts = torch.randperm(EXPERTS, generator=generator)[:num]
        resident.append(experts[misses:] + layer * EXPERTS)
        wanted.append(experts.to(DEVICE))
    held = torch.cat(resident)
    others = torch.randperm(LAYERS * EXPERTS, generator=generator)[: pool.num_slots - len(held)]
    held = torch.cat([held, others + LAYERS * EXPERTS])
    held = held[torch.randperm(len(held), generator=generator)].to(DEVICE)
    pool.id_of.copy_(held)
    pool.slot_of[held] = torch.arange(len(held), dtype=torch.int32, device=DEVICE)
    keys = torch.randint(1, 1 << 40, pool.policy.keys.shape, generator=generator)
    keys[: LAYERS * EXPERTS] += 1 << 41
    pool.policy.keys.copy_(keys)
    return wanted


def layer_us(pool: SlotPool, ids: list[torch.Tensor], touch: Touch) -> float:
    policy: CachePolicy = pool.policy
    kept = [(tensor, tensor.clone()) for tensor in (pool.slot_of, pool.id_of, policy.keys)]
    token = torch.tensor(1 << 20, device=DEVICE)

    def restore() -> None:
        for tensor, saved in kept:
            tensor.copy_(saved)

    def step() -> None:
        restore()
        for layer, experts in enumerate(ids):
            admitted = launch_admit(experts, layer, EXPERTS, pool.slot_of, pool.id_of, policy.keys)
            touch(admitted.unique, Step(token, layer, Phase.DECODE))

    return (graph_us([step]) - graph_us([restore])) / len(ids)


def gathers() -> list[dict[str, object]]:
    """GB/s of a gather inside a graph, by grid and number of experts of 9.4 and 2.8 MB."""
    rows = []
    for row_bytes in (9_437_184, 2_764_800):
        bank = torch.randint(0, 256, (128, row_bytes), dtype=torch.uint8, device=DEVICE)
        bank = bank.cpu().pin_memory()
        slots = torch.empty(16, row_bytes, dtype=torch.uint8, device=DEVICE)
        for config in GATHERS:
            rates = {n: gather_rate(bank, slots, n, config) for n in (1, 2, 4, 6, 8)}
            rows.append({"row_bytes": row_bytes, "config": config._asdict(), "gb_per_s": rates})
    return rows


def gather_rate(bank: torch.Tensor, slots: torch.Tensor, num: int, config: GatherConfig) -> float:
    experts = torch.randperm(len(bank), device=DEVICE)[:16].int()
    rows = torch.arange(16, dtype=torch.int32, device=DEVICE)
    number = torch.tensor([num], dtype=torch.int32, device=DEVICE)

    def work() -> None:
        launch_gather(bank, slots, experts, rows, number, config)

    return num * bank.shape[1] / graph_us([work] * 4) / 1e3


if __name__ == "__main__":
    main()
