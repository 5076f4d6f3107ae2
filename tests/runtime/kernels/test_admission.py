"""Oracle, the runtime's definition and the kernel agree on every step of random pools."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residency.policies.step import IdSpace
from residency.runtime.admission import admit, copy_list, distinct
from residency.runtime.kernels.admission import MAX_IDS, NO_COPY, launch_admit

FORMS = ["definition", "kernel"]
KEY_RANGES = {
    "ties": (0, 2),
    "clock": (0, 10_000),
    "wide": (-(2**63), 2**63 - 1),
}


@dataclass
class Result:
    """Lists without padding."""

    unique: list[int]
    copies: list[tuple[int, int]]  # (layer-local expert, slot)
    counts: list[int]
    on_host: list[int] = field(default_factory=list)  # layer-local, ascending
    displaced: list[int | None] = field(default_factory=list)  # by each copied expert


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

    def admit(self, experts: list[int], layer: int, quota: list[int] | None = None) -> Result:
        first = layer * self.num_experts
        unique = sorted({first + e for e in experts if e < self.num_experts})
        misses = [i for i in unique if i not in self.slot_of]
        num_misses, on_host = len(misses), []
        if quota is not None:
            ranked = sorted(misses, key=lambda i: (self.keys[i], i), reverse=True)
            misses = sorted(ranked[: quota[num_misses]])
            on_host = sorted(ranked[quota[num_misses] :])
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
            copies.append((missing - first, slot))
        counts = [len(unique), len(unique) - num_misses, num_misses, num_evictions, len(on_host)]
        num_empty = len(misses) - num_evictions
        displaced = [None] * num_empty + evictable[:num_evictions]
        return Result(unique, copies, counts, [i - first for i in on_host], displaced)


class TensorPool:
    """The maps of an oracle pool as tensors."""

    def __init__(self, oracle: OraclePool, device: torch.device) -> None:
        num_ids = len(oracle.keys) - 1
        held = [num_ids if i is None else i for i in oracle.held]
        slot_of = [oracle.slot_of.get(i, -1) for i in range(num_ids)] + [-1]
        self.space = IdSpace(num_ids // oracle.num_experts, oracle.num_experts, top_k=1)
        self.id_of = torch.tensor(held, dtype=torch.int32, device=device)
        self.slot_of = torch.tensor(slot_of, dtype=torch.int32, device=device)
        self.keys = torch.tensor(oracle.keys, dtype=torch.int64, device=device)
        self.totals = torch.zeros(5, dtype=torch.int64, device=device)

    def admit(
        self,
        form: str,
        experts: list[int],
        layer: int,
        quotas: list[int] | None = None,
        slots: range | None = None,
    ) -> Result:
        ids = torch.tensor(experts, device=self.keys.device)
        quota = None
        if quotas is not None:
            quota = torch.tensor(quotas, dtype=torch.int32, device=self.keys.device)
        if random.random() < 0.5:
            ids = ids.int()
        if form == "definition":
            unique = distinct(ids, layer, self.space)
            admission = admit(unique, self.slot_of, self.id_of, self.keys, None, quota, slots)
            on_host = (unique[admission.on_host] - layer * self.space.num_experts).tolist()
            copies = copy_list(admission, layer, self.space)
            counts = admission.counts
            self.totals += counts
            copy_expert, copy_slot, num_copies = copies
            entered = admission.entered != self.space.sink
            moves = torch.stack([admission.entered[entered], admission.evicted[entered]])
        else:
            moves = ids.new_full((2, len(experts)), self.space.sink, dtype=torch.int64)
            unique, copy_expert, copy_slot, host_expert, counts = admitted = launch_admit(
                ids, layer, self.space.num_experts, self.slot_of, self.id_of, self.keys,
                totals=self.totals, quota=quota, moves=moves, slots=slots,
            )  # fmt: skip
            num_copies = admitted.num_copies
            assert int(counts[5]) == int(counts[2] - counts[4])
            counts = counts[:5]
            on_host = sorted(e for e in host_expert.tolist() if e != NO_COPY)
            pads = [NO_COPY] * (len(experts) - int(num_copies))
            assert copy_expert[int(num_copies) :].tolist() == pads
            assert copy_slot[int(num_copies) :].tolist() == pads
            assert moves[:, int(num_copies) :].eq(self.space.sink).all()
            moves = moves[:, : int(num_copies)]
        real = int(counts[0])
        assert unique[real:].eq(self.space.sink).all()
        copied = [copy_expert[: int(num_copies)].tolist(), copy_slot[: int(num_copies)].tolist()]
        copies = list(zip(*copied, strict=True))
        first = layer * self.space.num_experts
        assert [e + first for e, _ in copies] == moves[0].tolist()
        displaced = [None if i == self.space.sink else i for i in moves[1].tolist()]
        return Result(unique[:real].tolist(), copies, counts.tolist(), on_host, displaced)


Step = tuple[list[int], int]  # experts, layer


def _replay(
    form: str,
    oracle: OraclePool,
    steps: list[Step],
    device: torch.device,
    quota: list[int] | None = None,
) -> None:
    pool = TensorPool(oracle, device)
    keys, totals = pool.keys.clone(), torch.zeros(5, dtype=torch.int64)
    for experts, layer in steps:
        want = oracle.admit(experts, layer, quota)
        assert pool.admit(form, experts, layer, quota) == want
        fresh = TensorPool(oracle, device)
        assert torch.equal(pool.id_of, fresh.id_of)
        assert torch.equal(pool.slot_of, fresh.slot_of)
        totals += torch.tensor(want.counts)
    assert torch.equal(pool.keys, keys)
    assert torch.equal(pool.totals.cpu(), totals)


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


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_steps(form: str, data: st.DataObject, device: torch.device) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    experts = data.draw(st.integers(1, 40))
    layers = data.draw(st.integers(1, 3))
    num = data.draw(st.integers(1, MAX_IDS))
    slots = data.draw(st.integers(min(num, experts), 150))
    oracle = _random_pool(
        rng, layers, experts, slots, data.draw(st.sampled_from(sorted(KEY_RANGES)))
    )
    none = data.draw(st.booleans())  # experts as an id stands for none
    steps = [
        ([rng.randrange(experts + none) for _ in range(num)], rng.randrange(layers))
        for _ in range(3)
    ]
    quota = [rng.randint(0, m) for m in range(experts + 1)] if data.draw(st.booleans()) else None
    _replay(form, oracle, steps, device, quota)


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), experts=st.integers(1, 30), each=st.integers(1, 80))
def test_layers_with_slots_of_their_own(
    form: str, seed: int, experts: int, each: int, device: torch.device
) -> None:
    """One pool of three layers' shares does what three pools do."""
    rng = random.Random(seed)
    num_ids = 3 * experts
    keys = [rng.randint(0, 2) for _ in range(num_ids + 1)]
    alone = [OraclePool([None] * each, keys, experts) for _ in range(3)]
    pool = TensorPool(OraclePool([None] * (3 * each), keys, experts), device)
    for _ in range(5):
        layer = rng.randrange(3)
        wanted = [rng.randrange(experts) for _ in range(rng.randint(1, each))]
        want = alone[layer].admit(wanted, layer)
        slots = range(layer * each, layer * each + each)
        want.copies = [(expert, slot + slots.start) for expert, slot in want.copies]
        assert pool.admit(form, wanted, layer, slots=slots) == want
        held = [num_ids if i is None else i for oracle in alone for i in oracle.held]
        assert pool.id_of.tolist() == held
        for slot, i in enumerate(held):
            assert i == num_ids or pool.slot_of[i] == slot


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_fetched_without_slots(form: str, device: torch.device) -> None:
    oracle = OraclePool([], [0] * 13, 6)
    got = TensorPool(oracle, device).admit(form, [5, 1, 5], 1, [0] * 7)
    assert got == Result([7, 11], [], [2, 0, 2, 0, 2], [1, 5])


@pytest.mark.parametrize("form", FORMS)
def test_the_highest_keys_are_fetched_and_of_ties_the_highest_id(form, device):
    oracle = OraclePool([None] * 4, [3, 9, 3, -5, 3, 0, 0], 6)
    got = TensorPool(oracle, device).admit(form, [4, 3, 2, 1, 0], 0, [0, 0, 0, 0, 0, 3])
    assert got.copies == [(1, 0), (2, 1), (4, 2)]
    assert got.on_host == [0, 3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num", [8, 128])
@pytest.mark.parametrize("stride", [1, 16, 15, 128])
def test_low_keys_a_stride_apart(form: str, num: int, stride: int, device: torch.device) -> None:
    """1,024 slots make 16 lists; neighbours in a list are 17 apart, or 1 where the row turns."""
    slots, experts = 1024, 128
    held: list[int | None] = [experts + slot for slot in range(slots)]
    keys = [1000] * (experts + slots + 1)
    keys[experts : experts + slots] = range(1000, 1000 + slots)
    for place in range(60):
        keys[experts + 3 + place * stride % slots] = -place
    oracle = OraclePool(held, keys, experts)
    _replay(form, oracle, [(list(range(num)), 0), (list(range(num)), 0)], device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("empty", [False, True])
def test_low_slots_in_one_list(form: str, empty: bool, device: torch.device) -> None:
    """More slots of one list go than are ranked at first."""
    slots, lists, experts = 1024, 16, 128
    held: list[int | None] = [experts + slot for slot in range(slots)]
    keys = [0] * (experts + slots + 1)
    for row in range(slots // lists):
        slot = row * lists + (5 + row) % lists
        keys[experts + slot] = -1 - row
        if empty:
            held[slot] = None
    oracle = OraclePool(held, keys, experts)
    steps = [(list(range(first, first + num)), 0) for first, num in [(0, 8), (4, 40), (0, 128)]]
    _replay(form, oracle, steps, device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slots", [4000])
def test_many_slots(form: str, slots: int, device: torch.device) -> None:
    rng = random.Random(slots)
    oracle = _random_pool(rng, 48, 128, slots, "ties")
    steps = [([rng.randrange(128) for _ in range(64)], rng.randrange(48)) for _ in range(2)]
    _replay(form, oracle, steps, device)


@pytest.mark.parametrize("form", FORMS)
def test_needed_residents_stay_although_lowest(form: str, device: torch.device) -> None:
    oracle = OraclePool([0, 1, 2, 3], [0, 1, 2, 3, 9, 9, 9], 6)
    got = TensorPool(oracle, device).admit(form, [0, 5, 1, 4, 5], 0)
    assert got == Result([0, 1, 4, 5], [(4, 2), (5, 3)], [4, 2, 2, 2, 0], [], [2, 3])


@pytest.mark.parametrize("form", FORMS)
def test_empty_slot_goes_before_the_least_key(form: str, device: torch.device) -> None:
    oracle = OraclePool([0, None, 1, None], [-(2**63)] * 7, 6)
    _replay(form, oracle, [([5, 4, 3], 0)], device)


@pytest.mark.parametrize("form", FORMS)
def test_greatest_key_may_go(form: str, device: torch.device) -> None:
    oracle = OraclePool([0, 3, 1], [2**63 - 1] * 7, 6)
    _replay(form, oracle, [([5, 4, 3], 0)], device)


def test_too_many_ids_are_refused(device: torch.device) -> None:
    pool = TensorPool(OraclePool([None] * 200, [0] * 201, 200), device)
    with pytest.raises(AssertionError, match="129 ids"):
        pool.admit("kernel", list(range(129)), 0)
