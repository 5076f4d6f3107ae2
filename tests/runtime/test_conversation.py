"""Conversations: the same bits as a fresh run of the same schedule, and the right tokens cached."""

from itertools import pairwise

import pytest
import torch
from conftest import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.conf import build_engine, compose
from residency.policies.errors import CapacityError, WorkloadError
from residency.runtime.conversation import Conversation, common_prefix
from residency.runtime.memory import MemoryPlan
from residency.runtime.snapshots import Snapshot, cut_back

# Plain attention; a window shorter than the turns, recurrent states, an indexer's keys beside them.
CUT, KEPT = ("qwen3_moe",), ("gpt_oss", "qwen3_next", "qwen4_exp")
MESSAGES = ([5, 9, 77, 31, 2, 64, 8], [100, 3, 17, 90, 41], [12], [71, 66, 23, 9, 8, 55, 4, 90])
NEW = 4
ROOM = 200
CHUNKS = "prefill.chunk_tokens=3"


def conversing(engine, snapshots=16):
    engine._standing.planner.snapshots = snapshots
    return Conversation(engine, room=ROOM)


def say(conversation, prompt, **keys):
    """The turn, and the logits behind each of its new tokens."""
    seen = []
    keys = {"max_new_tokens": NEW, "ignore_eos": True} | keys
    turn = conversation.say(prompt, on_logits=seen.append, **keys)
    return turn, torch.stack(seen)


def talk(conversation, messages):
    """A turn for each message, each behind all that was said: prompts, turns and their logits."""
    line, said = [], []
    for message in messages:
        line = [*line, *message]
        turn, logits = say(conversation, line)
        said.append((line, turn, logits))
        line = [*line, *turn.report.token_ids]
    return said


def replayed(engine, said):
    """The logits of a schedule's turns, by plain generations that follow on one another, and cuts
    where a turn begins before the end of the one before.
    """
    for prompt, turn, logits in said:
        if 0 < turn.cached < engine.sequence.held:
            cut_back(engine.sequence, turn.cached)
        rest = prompt[-sum(turn.chunks) :]
        assert len(prompt) - len(rest) == turn.cached
        seen = []
        engine.generate(
            rest,
            answer=turn.report.token_ids,
            on_logits=seen.append,
            continued=turn.cached > 0,
            room=ROOM,
        )
        assert engine.keep().num_tokens == len(prompt) + turn.decode_steps
        yield logits, torch.stack(seen)


@pytest.mark.parametrize("model_type", CUT + KEPT)
def test_turns_have_the_bits_of_a_fresh_run_of_their_schedule(tiny_checkpoint, model_type):
    """Under another cache, another mode and other slots; and nearly those of one long prompt."""
    folder = tiny_checkpoint(model_type)
    with tiny_engine(folder, CHUNKS, "cache=lrfu", "cache.slots=50%") as engine:
        said = talk(conversing(engine), MESSAGES)
    assert [turn.chunks for _, turn, _ in said] == [(3, 3, 1), (3, 3), (2,), (3, 3, 3)]
    assert [turn.decode_steps for _, turn, _ in said] == [NEW - 1] * 4
    for (prompt, turn, _), (_, later, _) in pairwise(said):
        assert later.cached == len(prompt) + turn.decode_steps
    other = ("cache=lru", "cache.slots=6", "prefill=in_place")
    with tiny_engine(folder, CHUNKS, *other) as engine:
        for mine, theirs in replayed(engine, said):
            assert torch.equal(mine, theirs)
    with tiny_engine(folder, "cache.slots=all") as engine:
        for prompt, turn, logits in said:
            seen = []
            answer = turn.report.token_ids
            engine.generate(prompt, answer=answer, on_logits=seen.append, room=ROOM)
            torch.testing.assert_close(torch.stack(seen), logits, rtol=0, atol=2e-3)
            assert not torch.equal(torch.stack(seen), logits)  # other chunks: it can fail


@pytest.mark.parametrize("model_type", CUT + KEPT)
def test_a_branch_has_the_bits_of_a_fresh_run_of_its_schedule(tiny_checkpoint, model_type):
    """A cut falls behind the answer's newest token, in the next turn's first chunk, so that chunk
    is part of the schedule. A snapshot lies between two turns, and the one that was left is not.
    """
    cuts = model_type in CUT
    folder = tiny_checkpoint(model_type)
    with tiny_engine(folder, CHUNKS, "cache.slots=50%") as engine:
        conversation = conversing(engine)
        first, second, _ = talk(conversation, MESSAGES[:3])
        branch = [*second[0][: -len(MESSAGES[1])], 88, 7, 7, 6]
        turn, logits = say(conversation, branch)
        assert turn.cached == len(first[0]) + first[1].decode_steps + cuts
        _, once_more = say(conversation, second[0])
        assert cuts or torch.equal(once_more, second[2])
        torch.testing.assert_close(once_more, second[2], rtol=0, atol=2e-3)
    with tiny_engine(folder, CHUNKS, "cache.slots=all", "prefill=always_stream") as engine:
        schedule = [first, *([second] if cuts else []), (branch, turn, logits)]
        for mine, theirs in replayed(engine, schedule):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_a_branch_within_a_message_is_right(tiny_checkpoint, model_type):
    """A cut where layers can be cut; else the last snapshot before, and more tokens again."""
    folder = tiny_checkpoint(model_type)
    with tiny_engine(folder, CHUNKS, "cache.slots=50%") as engine:
        conversation = conversing(engine)
        first, second, _ = talk(conversation, MESSAGES[:3])
        branch = [*second[0][:-2], 99, 1, 30]
        turn, logits = say(conversation, branch)
        common = common_prefix(second[0], branch)
        before = len(first[0]) + first[1].decode_steps
        assert turn.cached == (common if model_type in CUT else before)
    with tiny_engine(folder, "cache.slots=all") as engine:
        seen = []
        engine.generate(branch, answer=turn.report.token_ids, on_logits=seen.append, room=ROOM)
        torch.testing.assert_close(torch.stack(seen), logits, rtol=0, atol=2e-3)


MODES = ("always_stream", "hit_d2d", "demand", "speculate", "auto")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_bits_and_counts_what_it_moved(checkpoint, mode):
    keys = (CHUNKS, "cache.slots=7")
    with tiny_engine(checkpoint, *keys, "prefill=in_place", "cache=lru") as engine:
        expected = talk(conversing(engine), MESSAGES[:3])
    with tiny_engine(checkpoint, *keys, f"prefill={mode}") as engine:
        for (_, turn, logits), (_, _, others) in zip(
            talk(conversing(engine), MESSAGES[:3]), expected, strict=True
        ):
            assert torch.equal(logits, others)
            row_bytes = engine.runtime.plan.row_bytes
            for row in turn.report.counters:
                assert row.hits + row.misses == row.lookups
                if row.phase == "decode":
                    assert row.bytes["fetch"] == row.misses * row_bytes
            decode = sum(r.lookups for r in turn.report.counters if r.phase == "decode")
            assert decode == turn.decode_steps * 2 * 3  # top-2 of three layers


def test_saying_a_prompt_again_prefills_one_token(checkpoint):
    with tiny_engine(checkpoint) as engine:
        conversation = conversing(engine)
        first, _ = say(conversation, MESSAGES[0])
        again, _ = say(conversation, MESSAGES[0])
        assert (again.cached, again.new) == (len(MESSAGES[0]) - 1, 1)
        assert again.report.token_ids == first.report.token_ids


def test_the_newest_token_is_not_cached_and_a_stop_token_neither(checkpoint):
    with tiny_engine(checkpoint) as engine:
        conversation = conversing(engine)
        turn, _ = say(conversation, MESSAGES[0])
        tokens = turn.report.token_ids
        assert conversation.tokens == [*MESSAGES[0], *tokens[:-1]]
        stop = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i)
        say(conversation, MESSAGES[0], stop_tokens=[tokens[stop]])
        assert conversation.tokens == [*MESSAGES[0], *tokens[:stop]]
        say(conversation, MESSAGES[0], stop_tokens=[tokens[0]])
        assert conversation.tokens == MESSAGES[0]
        alone, _ = say(conversation, MESSAGES[0], max_new_tokens=1)
        assert conversation.tokens == MESSAGES[0] and alone.decode_steps == 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_an_answer_that_is_interrupted_leaves_what_was_seen(tiny_checkpoint, model_type):
    with tiny_engine(tiny_checkpoint(model_type), CHUNKS) as engine:
        conversation = conversing(engine)
        asked = iter([False, False, True])
        turn, _ = say(conversation, MESSAGES[0], interrupted=lambda: next(asked))
        assert turn.report.finish == "interrupted"
        assert conversation.tokens == [*MESSAGES[0], *turn.report.token_ids[:2]]
        line = [*MESSAGES[0], *turn.report.token_ids, 8, 9]
        later, logits = say(conversation, line)
        assert later.cached == len(MESSAGES[0]) + 2
        said = [(MESSAGES[0], turn, None), (line, later, logits)]
    with tiny_engine(tiny_checkpoint(model_type), CHUNKS) as engine:
        (_, theirs) = list(replayed(engine, said))[-1]
        assert torch.equal(theirs, logits)


def test_a_turn_that_breaks_off_leaves_nothing_and_a_refusal_everything(checkpoint):
    def stop(logits):
        raise ZeroDivisionError

    with tiny_engine(checkpoint) as engine:
        conversation = conversing(engine)
        say(conversation, MESSAGES[0])
        held = list(conversation.tokens)
        with pytest.raises(WorkloadError):
            conversation.say([*held, 4], max_new_tokens=1 << 20)
        assert conversation.tokens == held
        with pytest.raises(ZeroDivisionError):
            conversation.say([*held, 4], on_logits=stop)
        assert conversation.tokens == []
        turn, logits = say(conversation, [*held, 4])
        assert turn.cached == 0
        say(conversation, [*held, 5])
        engine.generate([3, 4, 5], max_new_tokens=9, ignore_eos=True, room=ROOM)
        turn, others = say(conversation, [*held, 4])
        assert turn.cached == 0 and torch.equal(logits, others)


def test_as_many_snapshots_are_kept_as_there_is_room_for(tiny_checkpoint):
    with tiny_engine(tiny_checkpoint("qwen3_next"), CHUNKS) as engine:
        few = conversing(engine, snapshots=3)
        said = talk(few, MESSAGES[:3])
        ends = [end for p, t, _ in said for end in (len(p), len(p) + t.decode_steps)]
        assert [one.num_tokens for one in few._snapshots] == ends[-3:]
        assert few.go_back(ends[1]) == 0 and few.tokens == []
        none = conversing(engine, snapshots=0)
        talk(none, MESSAGES[:2])
        assert none._snapshots == [] and none.go_back(len(none.tokens) - 1) == 0


@pytest.mark.parametrize("model_type", CUT + KEPT)
def test_snapshots_are_in_the_memory_plan(tiny_checkpoint, model_type):
    folder = tiny_checkpoint(model_type)
    model = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cpu"]
    keys = ["workload=conversation", "workload.snapshots=5", "model.context=64"]
    with build_engine(compose([*model, *keys])) as engine:
        plan: MemoryPlan = engine.runtime.plan
        conversation = Conversation(engine)
        talk(conversation, MESSAGES[:3])
        assert engine.sequence.can_cut is (model_type in CUT)
        taken = Snapshot(engine.sequence).num_bytes
        assert plan.snapshot_bytes == pytest.approx(5 * taken, rel=0.01)
        assert (plan.snapshot_bytes == 0) is (model_type in CUT)
        assert len(conversation._snapshots) == (0 if model_type in CUT else 5)


def test_too_many_snapshots_are_refused_before_anything_is_taken(tiny_checkpoint):
    model = ["model=folder", f"model.path={tiny_checkpoint('qwen3_next')}", "device=cpu"]
    keys = ["workload=conversation", "workload.snapshots=100000000"]
    with pytest.raises(CapacityError, match=r"snapshots .* GiB.*workload\.snapshots"):
        build_engine(compose([*model, *keys]))


# What is said next: a message behind the newest answer, or behind the first so many tokens of what
# was said before, and how many tokens are answered.
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(2, 100), min_size=1, max_size=6),
        st.one_of(st.none(), st.floats(0, 1)),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def engines(request, tiny_checkpoint):
    folder = tiny_checkpoint(request.param)
    with tiny_engine(folder, CHUNKS, "cache.slots=50%") as one, tiny_engine(folder) as other:
        yield one, other


@settings(max_examples=12)
@given(steps=STEPS)
def test_whatever_is_said_the_cache_holds_the_conversation(engines, steps):
    engine, fresh = engines
    conversation = conversing(engine, snapshots=6)
    line = []
    for message, share, count in steps:
        if share is not None:
            line = line[: round(share * len(line))]
        prompt = [*line, *message]
        held = list(conversation.tokens)
        points = {one.num_tokens for one in conversation._snapshots} | {0, len(held)}
        turn, logits = say(conversation, prompt, max_new_tokens=count)
        common = min(common_prefix(held, prompt), len(prompt) - 1)
        if not engine.sequence.can_cut:
            common = max(point for point in points if point <= common)
        assert (turn.cached, turn.new) == (common, len(prompt) - common)
        assert sum(turn.chunks) == turn.new
        assert conversation.tokens == [*prompt, *turn.report.token_ids[: count - 1]]
        assert engine.sequence.held == engine.runtime.position == len(conversation.tokens)
        line = [*prompt, *turn.report.token_ids]
    seen = []
    fresh.generate(prompt, answer=turn.report.token_ids, on_logits=seen.append, room=ROOM)
    torch.testing.assert_close(torch.stack(seen), logits, rtol=0, atol=2e-3)
