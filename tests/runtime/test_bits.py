"""Invariant 1: logits are equal bit for bit, whatever the policies, slots, groups and ring."""

import pytest
import torch
from conftest import tiny_engine

from residency.conf.options import option_names
from residency.policies.errors import ResidencyError

MODES = tuple(f"prefill={name}" for name in option_names("prefill"))
PROMPT = list(range(3, 24))
CHUNKS = (1, 7, 64)


def logits(engine, prompts=(PROMPT, PROMPT[5:14])):
    """Logits behind every new token of two generations in a row: cold slots, then warm."""
    seen = []
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=5, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.fixture(scope="module", params=CHUNKS)
def resident(request, checkpoint):
    """(chunk length, logits with a slot for every expert)."""
    chunk = f"prefill.chunk_tokens={request.param}"
    with tiny_engine(checkpoint, "cache=lru", "cache.slots=all", "prefill=demand", chunk) as engine:
        logits(engine)  # afterwards every routed expert is in its slot
        return chunk, logits(engine)


# The step's top-k, a few, and all of 3 layers x 8 experts.
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("cache", "slots"), [("lru", 2), ("lrfu", 2), ("lrfu", 5), ("lru", 24)])
def test_equal_to_the_all_resident_run(checkpoint, resident, cache, mode, slots):
    chunk, expected = resident
    with tiny_engine(checkpoint, f"cache={cache}", mode, f"cache.slots={slots}", chunk) as engine:
        assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize(("groups", "ring"), [(1, 1), (3, 2), (8, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_equal_over_groups_and_ring(checkpoint, resident, mode, groups, ring):
    chunk, expected = resident
    cut = (f"prefill.groups={groups}", f"prefill.ring={ring}")
    with tiny_engine(checkpoint, mode, "cache.slots=5", *cut, chunk) as engine:
        assert torch.equal(logits(engine), expected)


OTHERS = (
    ("cache=s3fifo",),
    ("cache=succession",),
    ("cache=least_stale", "cache.admit_decode=false"),
    ("cache=fifo", "cache.scope=per_layer", "cache.admit_prefill=false"),
    ("cache.history=reset", "cache.scope=per_layer"),
)


@pytest.mark.parametrize("choice", OTHERS, ids=" ".join)
def test_equal_under_rules_that_decline_or_share_out_slots(checkpoint, resident, choice):
    chunk, expected = resident
    with tiny_engine(checkpoint, *choice, "cache.slots=6", chunk) as engine:
        assert torch.equal(logits(engine), expected)
        engine.runtime.pool.check()


def test_equal_with_pinned_experts(checkpoint, resident, tmp_path):
    """Of each layer's eight experts two may enter, in prefill and in decode."""
    chunk, expected = resident
    profile = tmp_path / "profile.json"
    profile.write_text(str([[0, 0, 9, 0, 0, 9, 0, 0]] * 3))
    pinned = ("cache=static", "cache.slots=6", f"cache.profile={profile}")
    with tiny_engine(checkpoint, *pinned, chunk) as engine:
        assert torch.equal(logits(engine), expected)
        resident_ids = set(engine.runtime.pool.id_of.tolist())
        assert resident_ids <= {8 * layer + e for layer in range(3) for e in (2, 5)} | {24}
        counters = engine.runtime.counters.rows()
        assert sum(row.evictions for row in counters) == 0 < sum(row.hits for row in counters)


@pytest.mark.parametrize("choice", [("cache=none", "prefill=always_stream"), ("decode=cpu",)])
def test_equal_without_slots(checkpoint, resident, choice):
    chunk, expected = resident
    with tiny_engine(checkpoint, *choice, chunk) as engine:
        assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize("slots", [2, 5, 14])
@pytest.mark.parametrize("mode", ["demand", "speculate", "auto"])
def test_equal_when_the_link_starts_before_the_host_has_planned(
    checkpoint, resident, mode, slots, monkeypatch
):
    chunk, expected = resident
    with tiny_engine(checkpoint, f"prefill={mode}", f"cache.slots={slots}", chunk) as engine:
        monkeypatch.setattr(engine.runtime._prefill, "_at_once", 1)
        assert torch.equal(logits(engine), expected)
        totals = engine.generate(PROMPT, max_new_tokens=1).phases[0]
        row_bytes = engine.runtime.plan.row_bytes
        if mode == "demand":
            assert totals.bytes["fetch"] == totals.misses * row_bytes
            assert (totals.bytes["d2d"] > 0) is (totals.misses > 0)


def test_equal_when_longer_chunks_fall_to_the_other_mode(checkpoint, resident):
    chunk, expected = resident
    fall = ("prefill=demand", "prefill.max_tokens=3", "prefill.otherwise=hit_d2d")
    with tiny_engine(checkpoint, "cache.slots=5", *fall, chunk) as engine:
        assert torch.equal(logits(engine), expected)


def test_the_comparison_can_fail(checkpoint, resident):
    """Another chunk length gives other bits in float32, so equality above is no accident."""
    _, expected = resident
    with tiny_engine(checkpoint, "prefill.chunk_tokens=20") as engine:
        assert not torch.equal(logits(engine), expected)


def test_a_step_that_is_broken_off_leaves_the_engine_usable(checkpoint, resident):
    chunk, expected = resident
    with tiny_engine(checkpoint, "cache.slots=5", "prefill=always_stream", chunk) as engine:
        maths = engine.runtime._prefill.maths
        original, maths.run = maths.run, _raise
        with pytest.raises(ResidencyError):
            engine.generate(PROMPT, max_new_tokens=2)
        maths.run = original
        assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize("nth", [0, 3, 8])
def test_an_interrupt_between_admission_and_copy_leaves_no_slot_without_its_expert(
    checkpoint, resident, nth
):
    """The nth fetch never happens, in prefill or decode, though its expert has a slot by then."""
    chunk, expected = resident
    with tiny_engine(checkpoint, "cache.slots=5", "prefill=demand", chunk) as engine:
        transfers = engine.runtime._prefill.transfers
        real, calls = transfers.fetch, iter(range(10_000))
        transfers.fetch = lambda *a: _raise() if next(calls) == nth else real(*a)
        with pytest.raises(ResidencyError):
            engine.generate(PROMPT[:2], max_new_tokens=6, ignore_eos=True)
        transfers.fetch = real
        engine.runtime.check()
        assert torch.equal(logits(engine), expected)


def _raise(*_):
    raise ResidencyError("broken off")
