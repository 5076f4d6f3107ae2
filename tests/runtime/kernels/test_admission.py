"""Oracle, torch definition and kernel agree on every step of random pools."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residency.runtime.kernels.admission import NO_COPY, Admission, admit, launch_admit

FORMS = {"definition": admit, "kernel": launch_admit}
KEY_RANGES = {
    "ties": (0, 2),
    "clock": (0, 10_000),
    "wide": (-(2**63), 2**63 - 1),
}


@dataclass
class OracleResult:
    """Lists without padding."""

    unique: list[int]
    copies: list[tuple[int, int]]  # (layer-local expert, slot)
    counts: list[int]


@dataclass
class OraclePool:
    """Admission as a person would do it, with dictionaries and sorting.

    `held` is the id of each slot (None: empty); keys are by id.
    """

    held: list[int | None]
    keys: list[int]
    num_experts: int
    slot_of: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.slot_of = {i: slot for slot, i in enumerate(self.held) if i is not None}

    def admit(self, ids: list[int], layer: int, clock: int | None = None) -> OracleResult:
        unique = sorted({layer * self.num_experts + expert for expert in ids})
        misses = [i for i in unique if i not in self.slot_of]
        places = [slot for slot, i in enumerate(self.held) if i is None]
        evictable = [i for i in self.slot_of if i not in unique]
        evictable.sort(key=lambda i: (self.keys[i], i))
        num_evictions = max(0, len(misses) - len(places))
        for victim in evictable[:num_evictions]:
            places.append(self.slot_of.pop(victim))
        copies = []
        for missing, slot in zip(misses, places, strict=False):
            self.slot_of[missing] = slot
            self.held[slot] = missing
            copies.append((missing - layer * self.num_experts, slot))
        if clock is not None:
            for i in unique:
                self.keys[i] = clock
        counts = [len(unique), len(unique) - len(misses), len(misses), num_evictions]
        return OracleResult(unique, copies, counts)


class TensorPool:
    """The maps of an oracle pool as tensors."""

    def __init__(self, oracle: OraclePool, device: torch.device) -> None:
        num_ids = len(oracle.keys) - 1
        held = [num_ids if i is None else i for i in oracle.held]
        slot_of = [oracle.slot_of.get(i, -1) for i in range(num_ids)] + [-1]
        self.num_experts = oracle.num_experts
        self.id_of = torch.tensor(held, dtype=torch.int32, device=device)
        self.slot_of = torch.tensor(slot_of, dtype=torch.int32, device=device)
        self.keys = torch.tensor(oracle.keys, dtype=torch.int64, device=device)

    def admit(self, form: str, ids: list[int], layer: int, clock: int | None) -> Admission:
        device, int64 = self.keys.device, torch.int64
        given_ids = torch.tensor(ids, dtype=random.choice([torch.int32, int64]), device=device)
        now = None if clock is None else torch.tensor([clock], dtype=int64, device=device)
        return FORMS[form](
            given_ids, layer, self.num_experts, self.slot_of, self.id_of, self.keys, now
        )


def _assert_same(pool: TensorPool, got: Admission, oracle: OraclePool, want: OracleResult) -> None:
    num_ids, num = len(oracle.keys) - 1, got.unique.numel()
    misses = len(want.copies)
    pads = [NO_COPY] * (num - misses)
    assert got.counts.tolist() == want.counts
    assert got.num_copies.tolist() == [misses]
    assert got.unique.tolist() == want.unique + [num_ids] * (num - len(want.unique))
    assert got.copy_expert.tolist() == [expert for expert, _ in want.copies] + pads
    assert got.copy_slot.tolist() == [slot for _, slot in want.copies] + pads
    fresh = TensorPool(oracle, pool.keys.device)
    assert pool.id_of.tolist() == fresh.id_of.tolist()
    assert pool.slot_of.tolist() == fresh.slot_of.tolist()
    assert pool.keys[:-1].tolist() == fresh.keys[:-1].tolist()


def _random_pool(
    rng: random.Random, layers: int, experts: int, slots: int, keys: str
) -> OraclePool:
    num_ids = layers * experts
    full = rng.choice([0.0, 0.5, 1.0])
    residents = rng.sample(range(num_ids), min(num_ids, int(slots * full)))
    held: list[int | None] = [*residents, *[None] * (slots - len(residents))]
    rng.shuffle(held)
    low, high = KEY_RANGES[keys]
    return OraclePool(held, [rng.randint(low, high) for _ in range(num_ids + 1)], experts)


Step = tuple[list[int], int, int | None]  # ids, layer, clock


def _replay(form: str, oracle: OraclePool, steps: list[Step], device: torch.device) -> None:
    pool = TensorPool(oracle, device)
    for ids, layer, clock in steps:
        want = oracle.admit(ids, layer, clock)
        _assert_same(pool, pool.admit(form, ids, layer, clock), oracle, want)


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_steps(form: str, data: st.DataObject, device: torch.device) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    experts = data.draw(st.integers(1, 40))
    layers = data.draw(st.integers(1, 3))
    num = data.draw(st.integers(1, 64))
    slots = data.draw(st.integers(min(num, experts), 150))
    oracle = _random_pool(
        rng, layers, experts, slots, data.draw(st.sampled_from(sorted(KEY_RANGES)))
    )
    steps = [
        ([rng.randrange(experts) for _ in range(num)], rng.randrange(layers), clock)
        for clock in rng.choices([None, 20_000, 20_001], k=3)
    ]
    _replay(form, oracle, steps, device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num", [8, 64])
def test_low_keys_in_one_lane_take_the_slow_path(form: str, num: int, device: torch.device) -> None:
    slots, experts, stride = 1024, 128, min(4 * max(8, num), 128)
    held: list[int | None] = [experts + slot for slot in range(slots)]
    keys = [1000] * (experts + slots + 1)
    for slot in range(0, slots, stride):
        for lane in range(num // 3):
            keys[experts + slot + lane] = slot
    oracle = OraclePool(held, keys, experts)
    _replay(form, oracle, [(list(range(num)), 0, None), (list(range(num)), 0, None)], device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slots", [4096, 5000])
def test_many_slots(form: str, slots: int, device: torch.device) -> None:
    rng = random.Random(slots)
    oracle = _random_pool(rng, 48, 128, slots, "ties")
    steps = [
        ([rng.randrange(128) for _ in range(64)], rng.randrange(48), clock)
        for clock in range(10, 14)
    ]
    _replay(form, oracle, steps, device)


@pytest.mark.parametrize("form", FORMS)
def test_needed_residents_stay_although_lowest(form: str, device: torch.device) -> None:
    oracle = OraclePool([0, 1, 2, 3], [0, 1, 2, 3, 9, 9, 9], 6)
    pool = TensorPool(oracle, device)
    got = pool.admit(form, [0, 5, 1, 4, 5], 0, None)
    assert got.copy_expert.tolist()[:2] == [4, 5]
    assert got.copy_slot.tolist()[:2] == [2, 3]
    assert got.counts.tolist() == [4, 2, 2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_empty_slot_goes_before_the_least_key(form: str, device: torch.device) -> None:
    oracle = OraclePool([0, None, 1, None], [-(2**63)] * 7, 6)
    _replay(form, oracle, [([5, 4, 3], 0, None)], device)


def test_too_many_ids_are_refused(device: torch.device) -> None:
    pool = TensorPool(OraclePool([None] * 100, [0] * 101, 100), device)
    with pytest.raises(AssertionError, match="65 ids"):
        pool.admit("kernel", list(range(65)), 0, None)
