"""Invariant 2: hits + misses = lookups, and the bytes reported are the bytes moved."""

import pytest
from conftest import tiny_engine

PROMPT = list(range(3, 30))
NUM_NEW = 6
TOP_K, NUM_EXPERTS, NUM_LAYERS = 2, 8, 3


def report_of(checkpoint, *overrides, prompts=(PROMPT,)):
    with tiny_engine(checkpoint, *overrides) as engine:
        copied = spy_on_copies(engine)
        for prompt in prompts:
            copied.clear()
            report = engine.generate(prompt, max_new_tokens=NUM_NEW, ignore_eos=True)
        return report, copied, engine.runtime.plan.row_bytes


def spy_on_copies(engine):
    """Bytes that truly reach device rows, by source, measured at the copy itself."""
    copied = {}
    transfers = engine.runtime._prefill.transfers
    tell, moved = transfers._copied, []

    def watched(copies):
        issue = copies.issue

        def spy(origin, sources, targets):
            transfers.rows[targets] = ~origin[sources]  # so that every byte must change
            issue(origin, sources, targets)
            reached = transfers.rows[targets]
            assert (reached == origin[sources]).all(), "a row was not copied whole"
            moved.append(reached.numel())

        copies.issue = spy

    def told(done, layer, phase, source, sources, rows):
        copied[str(source)] = copied.get(str(source), 0) + moved.pop()
        tell(done, layer, phase, source, sources, rows)

    watched(transfers._over_the_link)
    watched(transfers._within)
    transfers._copied = told
    return copied


@pytest.mark.parametrize("mode", ["always_stream", "hit_d2d", "demand"])
@pytest.mark.parametrize("slots", [2, 7, 24])
def test_sums_and_bytes(checkpoint, mode, slots):
    report, copied, row_bytes = report_of(
        checkpoint,
        f"prefill={mode}",
        f"cache.slots={slots}",
        "prefill.chunk_tokens=10",
        prompts=(PROMPT, PROMPT[::-1]),
    )
    for row in report.counters:
        assert row.hits + row.misses == row.lookups
        assert row.evictions <= row.misses
    moved = {}
    for row in report.counters:
        for source, num_bytes in row.bytes.items():
            moved[source] = moved.get(source, 0) + num_bytes
    assert {s: n for s, n in moved.items() if n} == copied
    decode = [row for row in report.counters if row.phase == "decode"]
    assert sum(r.lookups for r in decode) == (NUM_NEW - 1) * TOP_K * NUM_LAYERS
    for row in decode:
        assert row.bytes["fetch"] == row.misses * row_bytes
        assert row.bytes["stream"] == row.bytes["d2d"] == 0


def test_streaming_moves_every_expert_once_a_chunk(checkpoint):
    report, _, row_bytes = report_of(checkpoint, "prefill=always_stream", "prefill.chunk_tokens=10")
    num_chunks = -(-len(PROMPT) // 10)
    for row in report.counters:
        if row.phase == "prefill":
            assert row.bytes["stream"] == num_chunks * NUM_EXPERTS * row_bytes
            assert row.bytes["fetch"] == 0
            assert row.evictions == 0


def test_hit_d2d_moves_each_expert_over_the_link_or_on_the_device(checkpoint):
    report, _, row_bytes = report_of(
        checkpoint, "prefill=hit_d2d", "cache.slots=12", prompts=(PROMPT, PROMPT[::-1])
    )
    prefill = [row for row in report.counters if row.phase == "prefill"]
    assert all(r.bytes["stream"] + r.bytes["d2d"] == NUM_EXPERTS * row_bytes for r in prefill)
    assert sum(r.bytes["d2d"] for r in prefill) == 12 * row_bytes


@pytest.mark.parametrize("slots", [2, 3, 24])
def test_demand_loads_each_routed_expert_at_most_once_a_chunk(checkpoint, slots):
    """Invariant 4: with fewer slots than routed experts a chunk is worked off in waves."""
    report, _, row_bytes = report_of(checkpoint, "prefill=demand", f"cache.slots={slots}")
    for row in report.counters:
        if row.phase == "prefill":
            assert row.bytes["fetch"] == row.misses * row_bytes
            assert row.lookups > 3  # more than the smaller pools hold


def test_host_computed_experts_move_nothing_on_the_cpu(checkpoint):
    report, copied, _ = report_of(checkpoint, "decode=cpu")
    decode = [row for row in report.counters if row.phase == "decode"]
    assert all(row.computed == row.misses == row.lookups for row in decode)
    assert set(copied) == {"stream"}


def test_no_cache_fetches_every_lookup(checkpoint):
    report, _, row_bytes = report_of(checkpoint, "cache=none", "prefill=always_stream")
    for row in report.counters:
        assert row.hits == row.evictions == 0
        if row.phase == "decode":
            assert row.bytes["fetch"] == row.lookups * row_bytes
