"""Admission against a naive reading of its rules, over random ids, keys and pools."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.lru import Lru
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.admission import admit, distinct
from residency.runtime.host_admission import admit_on_host, distinct_on_host
from residency.runtime.slots import SlotPool

SPACE = IdSpace(num_layers=2, num_experts=6, top_k=3)


class NaivePool:
    """Dictionaries and sorting: one step at a time, exactly as the docstring of `admit` says."""

    def __init__(self, num_slots):
        self.slots = [None] * num_slots

    def admit(self, ids, keys, admitted, quota):
        wanted = sorted(set(ids))
        missing = [i for i in wanted if i not in self.slots]
        ranked = sorted(missing, key=lambda i: (admitted[i], keys[i], i), reverse=True)
        fetched = set(ranked[: quota[len(missing)]])
        entering = [i for i in missing if i in fetched and admitted[i]]
        empty = [s for s, held in enumerate(self.slots) if held is None]
        evictable = [i for i in self.slots if i is not None and i not in wanted]
        victims = sorted(evictable, key=lambda i: (keys[i], i))
        places = empty + [self.slots.index(i) for i in victims]
        evictions = max(0, len(entering) - len(empty))
        for i, place in zip(entering, places, strict=False):
            self.slots[place] = i
        num_misses, computed = len(missing), [i for i in missing if i not in fetched]
        counts = [len(wanted), len(wanted) - num_misses, num_misses, evictions, len(computed)]
        return counts, fetched, set(computed)


steps = st.lists(
    st.tuples(
        st.integers(0, SPACE.num_layers - 1),
        st.lists(st.integers(0, SPACE.num_experts - 1), min_size=1, max_size=5),
        st.lists(st.integers(-3, 3), min_size=SPACE.num_ids, max_size=SPACE.num_ids),
        st.lists(st.booleans(), min_size=SPACE.num_ids, max_size=SPACE.num_ids),
        st.lists(st.integers(0, SPACE.num_experts), min_size=7, max_size=7),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("form", [admit, admit_on_host])
@given(num_slots=st.integers(5, 14), steps=steps, declines=st.booleans(), capped=st.booleans())
@settings(deadline=None, max_examples=150)
def test_equal_to_the_naive_pool(form, num_slots, steps, declines, capped):
    naive = NaivePool(num_slots)
    slot_of = torch.full((SPACE.num_ids + 1,), -1, dtype=torch.int32)
    id_of = torch.full((num_slots,), SPACE.sink, dtype=torch.int32)
    for layer, experts, keys, admitted, quota in steps:
        if not declines:
            admitted = [True] * SPACE.num_ids
        unique = distinct(torch.tensor(experts), layer, SPACE)
        mask = torch.tensor([*admitted, True])[unique] if declines else None
        quota = [min(f, m) for m, f in enumerate(quota)] if capped else list(range(7))
        table = torch.tensor(quota, dtype=torch.int32) if capped else None
        result = form(unique, slot_of, id_of, torch.tensor([*keys, 0]), mask, table)
        ids = [layer * SPACE.num_experts + e for e in experts]
        before = list(naive.slots)
        counts, fetched, computed = naive.admit(ids, keys, admitted, quota)
        moves = [(new, old) for new, old in zip(naive.slots, before, strict=True) if new != old]
        assert moved(result) == sorted(moves)
        assert result.counts.tolist() == counts
        assert set(unique[result.fetched].tolist()) == fetched
        assert set(unique[result.on_host].tolist()) == computed
        assert (result.rows[result.on_host] == -1).all()
        held = [None if i == SPACE.sink else i for i in id_of.tolist()]
        assert held == naive.slots
        check_rows(result, slot_of, num_slots)


def moved(result):
    """(who entered, whom it displaced), ascending."""
    names = {SPACE.sink: None}
    pairs = zip(result.entered.tolist(), result.evicted.tolist(), strict=True)
    return [(new, names.get(old, old)) for new, old in pairs if new != SPACE.sink]


def check_rows(result, slot_of, num_slots):
    """Each wanted id has a row of its own: its slot, or a place behind the slots."""
    rows = []
    fields = (result.unique, result.rows, result.on_host)
    for i, row, on_host in zip(*(field.tolist() for field in fields), strict=True):
        if i != SPACE.sink and not on_host:
            assert row == slot_of[i] if slot_of[i] >= 0 else row >= num_slots
            rows.append(row)
    assert len(set(rows)) == len(rows)


def test_distinct_is_sorted_and_padded_and_ignores_none():
    none = SPACE.num_experts
    unique = distinct(torch.tensor([4, 1, 4, none]), 1, SPACE)
    assert unique.tolist() == [7, 10, SPACE.sink, SPACE.sink]


@given(experts=st.lists(st.integers(0, 5), min_size=1))
def test_distinct_on_the_host_is_the_same_without_padding(experts):
    unique = distinct(torch.tensor(experts), 1, SPACE)
    on_host = distinct_on_host(torch.tensor(experts).numpy(), SPACE.num_experts) + 6
    assert unique[unique != SPACE.sink].tolist() == on_host.tolist()


def test_admission_needs_no_host():
    """Meta tensors have no values, so whatever reads one on the host raises."""
    unique = distinct(torch.empty(4, dtype=torch.int64, device="meta"), 0, SPACE)
    slot_of = torch.empty(SPACE.num_ids + 1, dtype=torch.int32, device="meta")
    id_of = torch.empty(5, dtype=torch.int32, device="meta")
    keys = torch.empty(SPACE.num_ids + 1, dtype=torch.int64, device="meta")
    quota = torch.empty(7, dtype=torch.int32, device="meta")
    for table in (None, quota):
        assert admit(unique, slot_of, id_of, keys, None, table).counts.shape == (5,)


def test_pool_audits_itself():
    from residency.policies.errors import PolicyError

    pool = SlotPool(SPACE, 4, Lru(Lru.Config()), torch.device("cpu"))
    pool.admit(torch.tensor([0, 2]), Step(torch.tensor(1), 0, Phase.DECODE))
    pool.check()
    pool.id_of[0] = 5
    with pytest.raises(PolicyError, match="slot maps disagree"):
        pool.check()
