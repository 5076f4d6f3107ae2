"""A live resize: the best residents, the policy's history and the conversation stay."""

import json
from functools import cache

import pytest
import torch
from conftest import tiny_engine, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.conf import build_engine, compose
from residency.policies.errors import CapacityError, ConfigError
from residency.policies.step import IdSpace
from residency.runtime.offload import OffloadRuntime

SPACE = IdSpace(num_layers=3, num_experts=8, top_k=2)  # of the tiny checkpoint
TURNS = ([5, 9, 77, 31, 2, 64, 8, 100], [3, 17, 90], [41, 12, 55, 6], [7, 7])
SIZES = (6, 9, 12, 15, 21, 24)  # what each layer can have a share of, two experts at least
CHOICES = (
    "cache=lru",
    "cache=lrfu",
    "cache=lrfu cache.history=reset cache.scope=per_layer",
    "cache=s3fifo prefill=hit_d2d",
    "cache=succession cache.scope=per_layer",
    "cache=static prefill=always_stream",
)
FOLLOWS = ("history=reset", "s3fifo", "static")  # the state tells of residents, or of the slots


@pytest.fixture(scope="module")
def engine_of(checkpoint, tmp_path_factory):
    """Engines that stay, by choice."""
    profile = tmp_path_factory.mktemp("profile") / "counts.json"
    counts = [[(3 * layer + 5 * i) % 11 for i in range(8)] for layer in range(3)]
    profile.write_text(json.dumps(counts))
    engines = []

    @cache
    def make(choice):
        more = (f"cache.profile={profile}",) if "static" in choice else ()
        engines.append(tiny_engine(checkpoint, *choice.split(), "cache.slots=6", *more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def logits_of(engine, turn, **options):
    seen = []
    engine.generate(turn, max_new_tokens=3, ignore_eos=True, on_logits=seen.append, **options)
    return torch.stack(seen)


def conversation(engine, before_turn):
    """Logits of each turn; the newest token of an answer is not followed on."""
    found = []
    for number, turn in enumerate(TURNS):
        before_turn(number)
        found.append(logits_of(engine, turn, continued=number > 0))
    return found


@pytest.fixture(scope="module")
def resident(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=all") as engine:
        return conversation(engine, lambda number: None)


def residents(pool):
    return {i for i in pool.id_of.tolist() if i != SPACE.sink}


def best(pool, num_slots):
    """Residents of the highest (key, id), by share: by the definition, in plain Python."""
    keys, shares = pool.policy.keys.tolist(), pool.policy.num_shares(SPACE)
    found = set()
    for share in range(shares):
        own = [i for i in residents(pool) if i * shares // SPACE.num_ids == share]
        found |= set(sorted(own, key=lambda i: (keys[i], i))[-(num_slots // shares) :])
    return found


def resize_and_judge(engine, choice, num_slots):
    runtime = engine.runtime
    kept = best(runtime.pool, num_slots)
    if num_slots == runtime.pool.num_slots:
        assert kept == residents(runtime.pool)
    state = {name: t.clone() for name, t in runtime.pool.policy.state().items()}
    clock, seen, counted = runtime.clock.clone(), runtime.tokens_seen, runtime.counters.rows()
    engine.resize(num_slots)
    pool = runtime.pool
    pool.check()
    assert engine.runtime is runtime and pool.num_slots == num_slots == runtime.plan.num_slots
    assert engine.policies.cache is pool.policy
    assert residents(pool) == kept
    for slot, i in enumerate(pool.id_of.tolist()):
        if i != SPACE.sink:
            layer, expert = divmod(i, SPACE.num_experts)
            assert torch.equal(runtime.rows[slot], engine.banks.layers[layer][expert])
            assert slot in pool.slots_for(layer)
    assert (runtime.clock, runtime.tokens_seen) == (clock, seen)
    assert runtime.counters.rows() == counted
    if not any(word in choice for word in FOLLOWS):
        for name, tensor in pool.policy.state().items():
            assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("choice", CHOICES)
@given(sizes=st.lists(st.sampled_from(SIZES), min_size=len(TURNS), max_size=len(TURNS)))
@settings(max_examples=4)
def test_a_conversation_goes_on_with_equal_bits(engine_of, resident, choice, sizes):
    engine = engine_of(choice)
    found = conversation(engine, lambda turn: resize_and_judge(engine, choice, sizes[turn]))
    for one, judged in zip(found, resident, strict=True):
        assert torch.equal(one, judged)


def test_the_best_residents_are_not_all_of_them(engine_of):
    """Otherwise the comparison above would be idle."""
    engine = engine_of("cache=lrfu")
    engine.resize(24)
    logits_of(engine, TURNS[0])
    assert len(residents(engine.runtime.pool)) > 9 == len(best(engine.runtime.pool, 9))


def test_the_report_tells_of_it(engine_of):
    engine = engine_of("cache=lru")
    engine.resize(24)
    logits_of(engine, TURNS[0])
    num, row = len(residents(engine.runtime.pool)), engine.banks.layout.row_bytes
    engine.resize("25%")
    report = engine.generate(TURNS[1], max_new_tokens=1)
    (note,) = [note for note in report.notes if note.startswith("resized")]
    assert note.startswith(f"resized from 24 to 6 slots: 6 of {num} residents stayed, {6 * row:,} ")
    assert report.memory["num_slots"] == 6
    engine.resize("auto")
    assert "cache.slots=auto: 24 of 24" in engine.generate([3], max_new_tokens=1).notes


def test_what_was_kept_can_be_put_back(engine_of, resident):
    engine = engine_of("cache=lru")
    logits_of(engine, TURNS[0])
    kept = engine.keep()
    engine.resize(9)
    logits_of(engine, [90, 80, 70])
    engine.put_back(kept)
    engine.resize(12)
    assert torch.equal(logits_of(engine, TURNS[1], continued=True), resident[1])


def test_a_batch_is_decoded_in_the_new_slots(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=12", "workload.prompts=[a,b]") as engine:
        options = dict(max_new_tokens=4, ignore_eos=True)
        before = engine.generate_batch([TURNS[0], TURNS[2]], **options)
        batch = engine.sequences.together
        engine.resize(8)
        after = engine.generate_batch([TURNS[0], TURNS[2]], **options)
        assert engine.sequences.together is batch and engine.runtime.plan.num_slots == 8
        tokens = [[one.token_ids for one in report.sequences] for report in (before, after)]
        assert tokens[0] == tokens[1]


def test_under_another_prefill_mode_for_a_while(engine_of, resident):
    engine = engine_of("cache=lrfu")
    engine.resize(6)
    with engine.runtime.prefilling(compose(["prefill=hit_d2d"]).policies.prefill):
        engine.resize(15)
        assert torch.equal(logits_of(engine, TURNS[0]), resident[0])
    assert engine.policies.prefill.name != "hit_d2d"
    assert engine.runtime.plan.num_slots == engine.policies.cache.num_slots(SPACE) == 15
    assert torch.equal(logits_of(engine, TURNS[1], continued=True), resident[1])
    engine.runtime.check()


# What cannot be had is refused, and nothing has changed.


def unchanged(engine, resident):
    assert torch.equal(logits_of(engine, TURNS[1], continued=True), resident[1])


@pytest.mark.parametrize(
    ("choice", "slots", "words"),
    [
        ("cache=lru", 1, "cache.slots=1: one decode step needs 2 experts in slots at once"),
        ("cache=lru", 25, "the model has 24 experts"),
        ("cache=lru", 0, "it must be a number of experts above 0"),
        ("cache=lru", "lots", "cache.slots=lots"),
        ("cache=succession cache.scope=per_layer", 8, "cannot be shared out evenly"),
        ("cache=succession cache.scope=per_layer", 3, "in each of 3 layers' slots"),
    ],
)
def test_numbers_that_cannot_be(engine_of, resident, choice, slots, words):
    engine = engine_of(choice)
    logits_of(engine, TURNS[0])
    rows = engine.runtime.rows
    with pytest.raises(ConfigError, match=words):
        engine.resize(slots)
    assert engine.runtime.rows is rows
    unchanged(engine, resident)


def test_a_policy_without_slots(checkpoint):
    with (
        tiny_engine(checkpoint, "cache=none", "prefill=always_stream") as engine,
        pytest.raises(ConfigError, match="cache=none has no slots"),
    ):
        engine.resize(4)


def test_memory_is_judged_before_anything_goes(engine_of, resident, monkeypatch):
    engine = engine_of("cache=lrfu")
    engine.resize(12)
    logits_of(engine, TURNS[0])
    rows, row = engine.runtime.rows, engine.banks.layout.row_bytes
    now = engine.runtime.plan
    held = rows.nbytes + now.policy_bytes + engine.sequence.num_bytes
    free = now.device_bytes - now.weight_bytes - held + 4 * row  # beside 12 slots, for 3 more
    monkeypatch.setattr("residency.runtime.memory.free_host_bytes", lambda: free)
    with pytest.raises(CapacityError, match=r"host memory: .* needed, .* free .*cache\.slots"):
        engine.resize(17)
    assert engine.runtime.rows is rows
    unchanged(engine, resident)
    engine.resize(15)
    assert engine.runtime.plan.num_slots == 15
    monkeypatch.setattr("residency.runtime.memory.free_host_bytes", lambda: 0)
    engine.resize(9)  # less is always to be had
    assert engine.runtime.plan.num_slots == 9


def failing(monkeypatch, error, *sizes):
    equip = OffloadRuntime.equip

    def equip_or_fail(runtime, policies, plan):
        equip(runtime, policies, plan)
        if plan.num_slots in sizes:
            raise error

    monkeypatch.setattr(OffloadRuntime, "equip", equip_or_fail)


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), CapacityError, "the 9 slots there were"),
        (MemoryError(), CapacityError, "memory does not suffice; the 9 slots"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_memory_that_was_lost_meanwhile(engine_of, resident, monkeypatch, error, raised, words):
    engine = engine_of("cache=s3fifo prefill=hit_d2d")
    engine.resize(9)
    logits_of(engine, TURNS[0])
    pool, state = engine.runtime.pool, engine.policies.cache.state()
    before = pool.id_of.clone(), {name: tensor.clone() for name, tensor in state.items()}
    with monkeypatch.context() as patch:
        failing(patch, error, 21)
        with pytest.raises(raised, match=words):
            engine.resize(21)
    assert engine.runtime.plan.num_slots == 9
    assert torch.equal(engine.runtime.pool.id_of, before[0])
    for name, tensor in engine.policies.cache.state().items():
        assert torch.equal(tensor, before[1][name])
    engine.runtime.check()
    unchanged(engine, resident)


def test_when_not_even_the_old_slots_can_be_had(checkpoint, monkeypatch):
    with tiny_engine(checkpoint, "cache.slots=9") as engine:
        failing(monkeypatch, torch.OutOfMemoryError("none left"), 21, 9)
        with pytest.raises(CapacityError, match=r"9 slots, as before, .* has no slots any more"):
            engine.resize(21)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_graphs_are_captured_anew(tmp_path):
    sizes = dict(hidden_size=128, head_dim=64, moe_intermediate_size=64)
    folder = write_checkpoint(tmp_path / "model", "qwen3_moe", **sizes)
    model = ("model=folder", f"model.path={folder}", "device=cuda")
    with build_engine(compose([*model, "cache.slots=all"])) as engine:
        expected = conversation(engine, lambda number: None)
        engine.resize(4)
        assert engine.sequence._graph is None
        engine.resize(24)
        for sizes in ((6, 12, 24, 4), (4, 24, 7, 9)):
            found = conversation(engine, lambda turn, sizes=sizes: engine.resize(sizes[turn]))
            for one, judged in zip(found, expected, strict=True):
                assert torch.equal(one, judged)
            assert engine.sequence._graph is not None
