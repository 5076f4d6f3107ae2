"""The copies of a chunk: which marks each is issued behind, where lanes could overtake another."""

from types import SimpleNamespace

import pytest

from residency.runtime.admission import Placed, Rows
from residency.runtime.lanes import Mark
from residency.runtime.lots import Lot, Pending
from residency.runtime.prefill_copies import LOT_BYTES, ChunkCopies
from residency.runtime.staging import StagingRing

ROW_BYTES = LOT_BYTES // 3


class Issued:
    """Stands in for transfers and lanes: writes down who waits for whom."""

    def __init__(self):
        self.lanes = self
        self.rows = SimpleNamespace(shape=(99, ROW_BYTES))
        self.fetched, self.moved, self.waited = [], [], []

    def mark(self):
        return Mark()

    def wait(self, mark):
        self.waited.append(mark)

    def fetch(self, layer, phase, source, experts, rows, *after):
        return self._noted(self.fetched, experts, rows, after)

    def duplicate(self, layer, phase, slots, rows, *after):
        return self._noted(self.moved, slots, rows, after)

    def _noted(self, where, sources, rows, after):
        ready = Mark()
        where.append((list(sources), list(rows), after, ready))
        return ready


@pytest.fixture
def issued():
    return Issued()


@pytest.fixture
def copies(issued):
    learning = SimpleNamespace(copied=lambda *args, **more: None)
    made = ChunkCopies(StagingRing(50, 2, 8, issued), issued, learning, group_size=8)
    made.begin()
    return made


def placed(*pairs):
    experts, rows = zip(*pairs, strict=True)
    return Placed(Rows([], []), Rows(list(experts), list(rows)), [])


def test_lots_are_as_large_as_the_link_takes_two_milliseconds_for(copies, issued):
    after = Mark()
    lots = copies.admit(0, placed(*((e, e + 10) for e in range(7))), {}, (), after)
    assert [lot.experts for lot in lots] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [lot.rows for lot in lots] == [[10, 11, 12], [13, 14, 15], [16]]
    assert not issued.moved


def test_a_fetch_into_a_slot_comes_behind_the_last_copy_out_of_one(copies, issued):
    copies.stage(Pending(0, [4], [7], waited=True))  # from slot 7
    read = issued.moved[0][3]
    after = Mark()
    copies.admit(0, placed((5, 7)), {}, (), after)
    assert issued.fetched[-1][2] == (after, read)


def test_a_move_comes_behind_the_landing_and_a_freed_buffer_behind_the_move(copies, issued):
    lot = copies.stage(Pending(0, [4, 5], None, waited=True))
    landed = dict(zip(lot.experts, lot.rows, strict=True))
    after = Mark()
    assert copies.admit(0, placed((4, 1), (5, 2)), landed, (lot,), after) == []
    ((sources, rows, behind, moved),) = issued.moved
    assert (sources, rows) == (lot.rows, [1, 2]) and set(behind) >= {after, lot.ready}
    copies.done(lot)
    assert issued.waited[-1] is moved
    again = copies.stage(Pending(0, [6], None, waited=True))
    again = copies.stage(Pending(0, [6], None, waited=True))
    assert again.buffer is lot.buffer and lot.buffer.free in issued.fetched[-1][2]


def test_staging_that_is_full_takes_none(copies):
    lots = [copies.stage(Pending(0, [e], None, waited=False)) for e in range(3)]
    assert lots[2] is None and None not in lots[:2]
    copies.done(Lot(0, [1], [9], Mark()))  # has no buffer
    assert copies.stage(Pending(0, [5], None, waited=False)) is None
    copies.done(lots[0])
    assert copies.stage(Pending(0, [5], None, waited=False)) is not None
